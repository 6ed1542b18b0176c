"""One failed check of Draftproof, again: run this file with the Python that has the engine. It needs nothing but the
engine and the folder in which it lies.

`case.json` says what is asked, what is expected and what came when the check failed. Exits 1 while the engine still
gives other tokens than those expected, or fails; 2 where the tokens are as expected, so that what the check found must
be in what is printed beside them.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))


def main() -> int:
    case = json.loads((HERE / "case.json").read_text(encoding="utf-8").replace("{here}", str(HERE)))
    os.environ.update(case["variables"])
    say(f"{case['engine']} {case['version']}: {case['why']}")
    wire = importlib.import_module("wire")
    engine = importlib.import_module(case["worker"]).Served()
    engine.load()
    engine.start(case["words"])
    for requests in case["before"]:
        engine.run({**case["order"], "requests": requests}, wire.Tensors())
    answer = engine.run(case["order"], wire.Tensors())
    engine.stop()
    wrong = 0
    for one in answer["completions"]:
        name = f"{one['request_id']}#{one['index']}"
        expected, then = case["expected"].get(name), case["seen"].get(name)
        say(f"{name}: prompt {one['prompt_token_ids']}")
        for told, tokens in (("expected", expected), ("then", then), ("now", list(one["token_ids"]))):
            say(f"  {told:9}{tokens}")
        for field in ("finish_reason", "accept_lens", "draft_lens"):
            if one.get(field) is not None:
                say(f"  {field} {one[field]}")
        if one.get("logprobs") is not None:
            say(f"  {len(one['logprobs'])} rows of logprobs")
        if one.get("hidden_states") is not None:
            rows = one["hidden_states"]
            say(f"  hidden states: {rows['prefill']['shape']}, then {[row['shape'] for row in rows['decode']]}")
        wrong += expected is not None and list(one["token_ids"]) != expected
    if not wrong:
        say("The tokens are as expected. What the check found:")
        say(case["why"])
    return 1 if wrong else 2


def say(line: Any) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.chdir(folder)  # a worker may write beside itself
        sys.exit(main())
