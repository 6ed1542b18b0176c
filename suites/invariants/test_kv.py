"""KV-1: every way to lose, double or leak a page is red after its step; NaN in a result names the reader."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.contract import HiddenStates
from harness.invariants import kv_1, kv_1_poison
from suites.registration import suite

from .builders import PAGES, WIDTH, Corruption, assert_red, both, completion, delta, good_run, step

suite(seconds=0.2, stage="cpu", needs="cpu")


def held(**pages: tuple[int, ...]) -> Any:
    """Replace pages of owners `a` and `b`."""
    return lambda ledger: dict(ledger.held) | {f"{owner}#0": ids for owner, ids in pages.items()}


# After step 1: cached 0; a holds 1, 2 (6 tokens... in pages of 4), b holds 3, 4; the rest is free.
PAGE_FAULTS: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    ("leak", step(1, "pages", free=lambda p: p.free[1:]), "1 pages leaked", {"expected": PAGES, "got": PAGES - 1}),
    ("free and held", step(1, "pages", free=lambda p: (3, *p.free)), "held and free at once", {"request_id": "b"}),
    ("cached and held", step(1, "pages", cached=(0, 3)), "held and cached at once", {"request_id": "b", "row": 3}),
    ("free and cached", step(1, "pages", free=lambda p: (0, *p.free)), "free and cached at once", {"row": 0}),
    (
        "held twice",
        both(step(1, "pages", held=held(a=(1, 2, 3)))),
        "page 3 is held twice",
        {"row": 3, "got": ["a#0", "b#0"]},
    ),
    ("freed twice", step(1, "pages", free=lambda p: (*p.free, p.free[-1])), "listed 2 times", {"row": PAGES - 1}),
    (
        "one owner twice",
        step(1, "pages", held=held(b=(4, 4, 5, 6))),
        "held by b#0: page 4 is listed 2 times",
        {"row": 4},
    ),
    ("out of range", step(1, "pages", free=lambda p: (*p.free, PAGES)), "free: page id out of range", {"got": PAGES}),
    ("block id -1", step(1, "pages", held=held(b=(4, 5, 6, -1))), "held by b#0: page id out of range", {"got": -1}),
    ("stranger", step(1, "pages", held=lambda p: {**p.held, "z#0": ()}), "no request of this run", {}),
    ("shared by nobody", step(1, "pages", shared=(9,)), "is shared, though nobody", {"row": 9}),
    ("total", step(1, "pages", total=PAGES + 1), "number of pages changed", {"expected": PAGES, "got": PAGES + 1}),
    ("huge total", step(1, "pages", total=10**12), "pages leaked", {"expected": 10**12, "got": PAGES}),
    ("no ledger", step(1, pages=None), "no page ledger", {}),
    ("nonsense", step(1, "pages", free=("one",)), "does not hold integers", {}),
]


@pytest.mark.parametrize(
    ("corrupt", "says", "where"), [c[1:] for c in PAGE_FAULTS], ids=[case[0] for case in PAGE_FAULTS]
)
def test_kv_1_is_red(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert kv_1(good_run()) == []
    assert_red(kv_1(corrupt(good_run())), "KV-1", says, step=1, **where)


def test_kv_1_lets_shared_pages_have_several_holders() -> None:
    ledger = good_run().steps[1].pages
    assert ledger is not None
    mine = ledger.held["a#0"]
    run = step(1, "pages", held=held(a=(*mine, ledger.held["b#0"][0])), shared=(ledger.held["b#0"][0],))(good_run())
    assert kv_1(run) == []


def test_kv_1_wants_everything_back_at_idle() -> None:
    kept = step(-1, "pages", held={"b#0": (1, 2)}, free=tuple(range(3, PAGES)))(good_run())
    assert_red(kv_1(kept), "KV-1", "still held when the engine is idle", request_id="b", got=(1, 2))
    assert kv_1(replace(kept, idle=False)) == []


NAN_ROW = torch.full((WIDTH,), torch.nan)

POISON: list[tuple[str, Corruption, str, dict[str, Any]]] = [
    (
        "completion",
        completion("b", hidden_states=lambda d: HiddenStates(d.hidden_states.prefill, (NAN_ROW,) * 5)),
        "hidden row of the completion is NaN",
        {"row": 5},
    ),
    ("step", delta(1, "b", decode_hidden=(NAN_ROW,)), "hidden row of the step is NaN", {"step": 1, "row": 0}),
    (
        "logprob",
        completion("b", logprobs=lambda d: (*d.logprobs[:2], replace(d.logprobs[2], logprob=math.nan))),
        "a logprob is NaN",
        {"row": 2, "position": 7},
    ),
    (
        "top",
        completion("b", logprobs=lambda d: (replace(d.logprobs[0], top=((3, math.nan), (4, -1.0))),)),
        "a logprob is NaN",
        {"row": 0},
    ),
    (
        "prompt",
        completion("b", prompt_logprobs=lambda d: (None, replace(d.prompt_logprobs[1], logprob=math.nan))),
        "a logprob is NaN",
        {"row": 1, "position": 1},
    ),
]


@pytest.mark.parametrize(("corrupt", "says", "where"), [case[1:] for case in POISON], ids=[case[0] for case in POISON])
def test_poison_in_a_result_is_red_for_a_black_box_too(corrupt: Corruption, says: str, where: dict[str, Any]) -> None:
    assert_red(kv_1_poison(corrupt(good_run())), "KV-1", says, request_id="b", **where)
    black = replace(good_run(), steps=())
    assert kv_1_poison(black) == []
    if "step" not in where:
        assert_red(kv_1_poison(replace(corrupt(good_run()), steps=())), "KV-1", says, request_id="b", **where)
        assert_red(kv_1(corrupt(good_run())), "KV-1", says, request_id="b", **where)
