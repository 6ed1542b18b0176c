"""GRAM-1: text outside the grammar, an end too early, and drafts accepted behind the end are red, with their place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.contract import Run, Usage
from harness.invariants import Misuse, gram_1
from suites.registration import suite

from .builders import Corruption, assert_red, both, completion, good_run, step, text_of

suite(seconds=0.1, stage="cpu", needs="cpu")

# a: prompt 1 2 3, then 2 | 13 4 7 | 6 | 1 8 11 (12); b: prompt 4 5 6 7 8, then 11 | 10 5 | 12 15 14 (9).
TEXTS = {"a": "cnehgbil", "b": "lkfmpo"}
SPELLS = "[a-p]*"
EOS = (9,)


def asked(request_id: str, **sampling: Any) -> Corruption:
    def apply(run: Run) -> Run:
        changed = tuple(
            replace(r, sampling=replace(r.sampling, **sampling)) if r.request_id == request_id else r
            for r in run.requests
        )
        return replace(run, requests=changed)

    return apply


def judged(corruption: Corruption, **how: Any) -> Any:
    arguments = {"detokenize": lambda tokens: text_of(tuple(t for t in tokens if t not in EOS)), "eos_token_ids": EOS}
    return gram_1(corruption(good_run()), **(arguments | how))


def says(*tokens: int, reason: str = "stop") -> Corruption:
    """Request b came to these tokens, in the trace too."""
    spelled = text_of(tuple(token for token in tokens if token not in EOS))
    emitted = torch.full((2, 4), -1)
    emitted[0, :3] = torch.tensor((13, 4, 7))
    emitted[1, : len(tokens) - 1] = torch.tensor(tokens[1:])
    done = completion("b", token_ids=tokens, finish_reason=reason, text=spelled, usage=Usage(5, len(tokens)))
    verify = step(1, "verify", emitted=emitted, accept_lens=(3, len(tokens) - 1))
    rest = step(2, "verify", discarded=(False, True))
    return both(done, verify, rest)


def test_the_walk_is_what_the_tables_say() -> None:
    run = good_run()
    assert {done.request_id: done.text for done in run.completions} == TEXTS


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": SPELLS},
        {"regex": "lk(fm|xx)po"},
        {"regex": "lkfmpo(x+y)?"},
        {"regex": "lk[a-p]{4}x?"},
    ],
)
def test_what_the_grammar_accepts_is_green(grammar: dict[str, str]) -> None:
    assert judged(asked("b", **grammar)) == []
    assert judged(asked("b", **grammar), detokenize=None) == []


def test_requests_without_a_grammar_are_not_judged() -> None:
    assert judged(both(asked("b", regex=SPELLS), completion("a", text="{"))) == []
    assert_red(judged(completion("a", text="{")), "GRAM-1", "does not offer 'grammar'")


RED: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    (
        "outside",
        asked("b", regex="lkf[a-l]po"),
        "leaves the grammar at character 3",
        {"row": 3, "position": 8, "got": "m", "expected": "'abcdefghijkl'"},
    ),
    ("at once", asked("a", regex="[d-z]*"), "leaves the grammar at character 0", {"row": 0, "position": 3, "got": "c"}),
    (
        "behind the end",
        asked("b", regex="lkfm"),
        "leaves the grammar at character 4",
        {"row": 4, "expected": "the end"},
    ),
    (
        "text is not the tokens'",
        both(asked("b", regex=SPELLS), completion("b", text="lkfmp!")),
        "the text leaves the grammar",
        {"got": "!"},
    ),
    (
        "tokens behind a text that was cut",
        both(asked("b", regex="lkf"), completion("b", text="lkf")),
        "the text of the token ids leaves the grammar at character 3",
        {"row": 3},
    ),
    (
        "ends too early",
        both(asked("b", regex="lkfmpox"), completion("b", finish_reason="stop")),
        "the output ends before the grammar does",
        {"got": "the end", "expected": "'x'"},
    ),
    (
        "EOS too early",
        both(asked("b", regex="lkfx"), says(11, 10, 5, 9)),
        "the output ends before the grammar does",
        {"row": 3},
    ),
    (
        "EOS too early, with a stop id that is another",
        both(asked("b", regex="lkfx", stop_token_ids=(1,)), says(11, 10, 5, 9)),
        "the output ends before the grammar does",
        {"row": 3},
    ),
    (
        "aborted at the end",
        both(asked("b", regex="lkfmpo"), completion("b", finish_reason="abort")),
        "aborted where its grammar is complete",
        {"got": "abort"},
    ),
    ("no text at all", both(asked("b", regex=SPELLS), completion("b", text=None)), "nothing to judge", {}),
]


@pytest.mark.parametrize(("corruption", "message", "where"), [pytest.param(*r[1:], id=r[0]) for r in RED])
def test_red(corruption: Corruption, message: str, where: dict[str, Any]) -> None:
    how: dict[str, Any] = {"detokenize": None} if message.startswith("nothing") else {}
    assert_red(judged(corruption, **how), "GRAM-1", message, **where)


def test_json() -> None:
    quoted = both(asked("b", json_schema='{"type": "string"}'), completion("b", text='"lkf'))
    assert judged(quoted, detokenize=None) == []
    assert_red(judged(quoted), "GRAM-1", "the text of the token ids leaves the grammar at character 0", row=0, got="l")


BLOCKS: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    (
        "a forbidden draft in a block that a finish cut",
        both(
            asked("b", regex="lkfx"),
            says(11, 10, 5, 12),
            completion("b", token_ids=(11, 10, 5), finish_reason="length"),
        ),
        "a block holds a token that the grammar forbids there",
        {"step": 1, "row": 1, "position": 8, "got": 12},
    ),
    (
        "drafts behind the end",
        both(asked("b", regex="lkf"), says(11, 10, 5, 9, 9), completion("b", token_ids=(11, 10, 5, 9))),
        "",
        {},
    ),
    (
        "drafts accepted behind the end",
        both(asked("b", regex="lk"), says(11, 10, 9, 9, 5), completion("b", token_ids=(11, 10, 9))),
        "a draft was accepted behind the end of the grammar",
        {"step": 1, "row": 1, "position": 8, "got": 9},
    ),
    (
        "EOS inside",
        both(
            asked("b", regex="lkfmp"), says(11, 10, 9, 5), completion("b", token_ids=(11, 10), finish_reason="length")
        ),
        "a block ends the output before the grammar does",
        {"step": 1, "row": 1, "position": 7, "got": 9},
    ),
]


@pytest.mark.parametrize(("corruption", "message", "where"), [pytest.param(*r[1:], id=r[0]) for r in BLOCKS])
def test_blocks(corruption: Corruption, message: str, where: dict[str, Any]) -> None:
    """What a finish hid from the user; the bonus token behind the end is nobody's, and green."""
    corruption = both(corruption, completion("b", text="lk"))
    if not message:
        corruption = both(corruption, completion("b", text="lkf"))
        assert judged(corruption) == []
        return
    assert_red(judged(corruption), "GRAM-1", message, **where)


def test_a_dead_end_is_no_fault() -> None:
    """Where nothing was left to choose the request is aborted, and the last id of its block stands for nothing."""
    dry = both(asked("b", regex="lkf~~"), says(11, 10, 5, 0, reason="abort"), completion("b", token_ids=(11, 10, 5)))
    assert judged(both(dry, completion("b", text="lkf"))) == []


def test_a_grammar_that_it_cannot_read_is_misuse() -> None:
    with pytest.raises(Misuse, match="unknown kind of group"):
        judged(asked("b", regex="(?=a)b"))
    with pytest.raises(Misuse, match="patternProperties"):
        judged(asked("b", json_schema='{"type": "object", "patternProperties": {}}'))
