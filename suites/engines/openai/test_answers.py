"""How answers are read: as vLLM gives them, with ids, ranks of the prompt, and the verify steps of a request."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from harness.known_answer.tokenizer import write_tokenizer
from suites.engines.openai.arrange import Pieces, completions, counters, renamed
from suites.registration import suite

suite(seconds=0.2, stage="cpu", needs="cpu")

FORM = {"ids": "token_ids", "accepted": "metrics.speculative.accepted", "drafted": "metrics.speculative.drafted"}
REQUEST = {"id": "q", "prompt_token_ids": [5, 6], "logprobs": 1, "prompt_logprobs": 1, "body": {}}
CHOICE = {
    "index": 0,
    "text": "89",
    "finish_reason": "length",
    "token_ids": [9, 10],
    "logprobs": {
        "tokens": ["token_id:9", "token_id:10"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"token_id:9": -0.5, "token_id:3": -1.0}, {"token_id:10": -9999.0, "token_id:4": -0.1}],
    },
    "prompt_logprobs": [
        None,
        {
            "6": {"logprob": -2.0, "rank": 2, "decoded_token": "5"},
            "7": {"logprob": -1.0, "rank": 1, "decoded_token": "6"},
        },
    ],
}
USAGE = {"prompt_tokens": 2, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}


@pytest.fixture
def pieces(tmp_path: Path) -> Any:
    write_tokenizer(tmp_path, 64, 2)
    return Pieces(tmp_path)


def told(pieces: Any, steps: Any = None, **changes: Any) -> dict[str, Any]:
    answer = {"choices": [{**CHOICE, **changes}], "usage": USAGE, "metrics": {"speculative": steps}}
    (one,) = completions(REQUEST, answer, FORM, pieces)
    made: dict[str, Any] = one
    return made


def test_rows_have_what_was_asked_for(pieces: Any) -> None:
    """A server lists the token itself beside the best ones; -9999 stands for minus infinity."""
    first, second = told(pieces)["logprobs"]
    assert first == {"token_id": 9, "logprob": -0.5, "rank": None, "top": [(9, -0.5)]}
    assert second == {"token_id": 10, "logprob": -math.inf, "rank": None, "top": [(4, -0.1)]}


def test_rows_of_the_prompt_have_ranks(pieces: Any) -> None:
    nothing, row = told(pieces)["prompt_logprobs"]
    assert nothing is None
    assert row == {"token_id": 6, "logprob": -2.0, "rank": 2, "top": [(7, -1.0)]}


def test_usage_is_passed_on(pieces: Any) -> None:
    assert told(pieces)["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "cached_tokens": 1}


@pytest.mark.parametrize(
    ("count", "accept_lens", "draft_lens"),
    [(8, [4, 1, 2], [3, 3, 3]), (7, [4, 1, 2], [3, 3, 3]), (10, [4, 1, 2, 1, 1], [3, 3, 3, 0, 0])],
    ids=["whole", "the last block is cut", "no room for drafts at the end"],
)
def test_verify_steps(pieces: Any, count: int, accept_lens: list[int], draft_lens: list[int]) -> None:
    steps = {"accepted": [3, 0, 1], "drafted": [3, 3, 3]}
    one = told(pieces, steps, token_ids=[9] * count)
    assert (one["accept_lens"], one["draft_lens"]) == (accept_lens, draft_lens)


def test_a_request_without_drafts_has_steps_without_drafts(pieces: Any) -> None:
    one = told(pieces, {}, token_ids=[9] * 3)
    assert (one["accept_lens"], one["draft_lens"]) == ([1, 1], [0, 0])


def test_steps_that_are_not_told_are_not_made_up(pieces: Any) -> None:
    """vLLM has none of a request that a stop string ended."""
    assert "accept_lens" not in told(pieces, None, token_ids=[9] * 3)


METRICS = """
# HELP drafts_total Number of drafts.
drafts_total{engine="0",model="m"} 4.0
drafts_total{engine="1",model="m"} 2.0
positions_total{engine="0",position="0"} 3.0
positions_total{engine="1",position="0"} 1.0
positions_total{engine="0",position="1"} 2.0
drafts_created{engine="0"} 1.7e+09
"""


def test_counters_are_summed_over_engines() -> None:
    names = {"num_drafts": "drafts_total", "accepted_per_position": "positions_total"}
    assert counters(METRICS, names) == {"num_drafts": 6, "accepted_per_position": [4, 2]}
    with pytest.raises(ValueError, match="the metrics have no counter tokens_total"):
        counters(METRICS, {"num_draft_tokens": "tokens_total"})


def test_text_that_no_tokens_spell_is_told(pieces: Any) -> None:
    with pytest.raises(ValueError, match="'§' is no token of the checkpoint"):
        pieces.spelt("0§", 2, False)
    with pytest.raises(ValueError, match="4 tokens are billed and 2 are spelt by the text '01'"):
        pieces.spelt("01", 4, True)


def test_a_checkpoint_under_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, beside = tmp_path / "model", tmp_path / "worker"
    for folder in (model, beside):
        folder.mkdir()
    monkeypatch.chdir(beside)
    (model / "config.json").write_text('{"architectures": ["TheirEagle"], "vocab_size": 9}')
    (model / "model.safetensors").write_bytes(b"weights")
    here = Path(renamed(model, {"TheirEagle": "OurEagle"}))
    assert json.loads((here / "config.json").read_text()) == {"architectures": ["OurEagle"], "vocab_size": 9}
    assert (here / "model.safetensors").read_bytes() == b"weights"
    assert renamed(model, {"Another": "OurEagle"}) == str(model)
