"""Files of servers that tests write."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from harness.engines.isolated.engine import WORKERS

# What a worker imports lies beside it.
sys.path.append(str(WORKERS))

import http_json
from openai_answers import Pieces, completions, counters
from server_process import ServerProcess, filled
from wire import renamed

__all__ = [
    "FAKE",
    "Pieces",
    "ServerProcess",
    "completions",
    "counters",
    "filled",
    "http_json",
    "renamed",
    "server_file",
]

FAKE = Path(__file__).parent / "fake_server.py"
FILE = """
command = ["{program}", {fake}, "--target", "{{target}}", "--port", "{{port}}", "--context", "{{context_length}}",
           "--fault", "{fault}", "--dtype", "{{dtype}}"]
version = "1"
refusals = ["ValueError: "]
ids = "{ids}"
patience = {patience}
silence = {silence}
{more}
[fields]
max_running = []
chunk_size = []
prefix_cache = {{}}
seed = []
[request]
stop_token_ids = "stop_token_ids"
ignore_eos = "ignore_eos"
min_new_tokens = "min_tokens"
prompt_logprobs = "echo"
[semantics]
processor_order = ["logit_bias", "penalties", "temperature", "top_p"]
seeds_of_samples = "consecutive"
"""


def server_file(folder: Path, fault: str = "", **words: Any) -> Path:
    """A file that starts the fake server with a fault. `words` replace what else is in braces there."""
    plain = {"program": sys.executable, "fake": json.dumps(str(FAKE)), "ids": "token_ids", "more": ""}
    told = {**plain, "patience": 20.0, "silence": 10.0, **words, "fault": fault}
    path = folder / "server.toml"
    path.write_text(FILE.format(**told), encoding="utf-8")
    return path
