"""The whole engine, exactly: propose, verify, commit. Whatever is drafted and however, each token of a block has the
law that the request asked for, given the tokens before it, in every place of the block and for every processor.

By the chain rule so has the block. That no coin decides twice is for `test_sampled_requests`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness.contract import Refused
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES
from harness.workloads.laws import DRAFT_METHODS, NUM_STEPS
from kernels import mass
from reference_engine.drafters import base
from reference_engine.sampling import sampler
from reference_engine.sampling.processors import SamplingBatch
from suites.reference_engine.block_places import judged, prefilled, requests, wrong
from suites.reference_engine.conftest import OpenLane
from suites.reference_engine.support import Method
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=6.1, stage="cpu", needs="cpu")

CELLS = [(name, method) for name, lane in LANES.items() for method in DRAFT_METHODS[: 1 + lane.speculative]]

GREEDY_ONES = ("EAGLE3", "MTP", "DFLASH", "EAGLE-tree", "NGRAM", "CUSTOM", "EXTRACT", "none")
"""Of these the drafts that are chosen greedily in every run, of the others those that are drawn: chains are verified
alike, whoever drafts them. EAGLE3 draws as well, since it alone has ids of its own to draw."""
IN_EVERY_RUN = [(name, method) for name, method in CELLS if (method == "probabilistic") != (name in GREEDY_ONES)]
IN_EVERY_RUN.append(("EAGLE3", "probabilistic"))


@pytest.mark.parametrize(("name", "method"), tiered(CELLS, *IN_EVERY_RUN))
def test_every_place_of_a_block_has_its_law(open_lane: OpenLane, name: str, method: Method) -> None:
    """Or the drafter cannot be started that way, and says so."""
    lane = open_lane(name)
    refused = refusal(lane, method)
    if refused is not None:
        assert refused.startswith(f"draft_sample_method={method!r}")
        return
    wanted = requests(lane, method)
    found = judged(lane, method, wanted)
    assert not wrong(found)
    depths = {(kind, len(path) - 1) for kind, path in found}
    # What is drafted from the text alone may lie too far off its law to be accepted under every option.
    steps = range(NUM_STEPS + 1) if lane.spec.may_equal_target else range(1)
    assert depths >= {(request.request_id, depth) for request in wanted for depth in steps}


def refusal(lane: Lane, method: Method) -> str | None:
    """Why the drafter cannot draft that way."""
    try:
        lane.claims(method)
    except Refused as refused:
        return str(refused)
    return None


def test_the_token_of_the_prefill_has_its_law(open_lane: OpenLane) -> None:
    lane = open_lane("EAGLE")
    assert not wrong(prefilled(lane, "greedy", requests(lane, "greedy")))


SHIFT = 0.02
"""Total variation of the planted errors."""


def shifted(law: torch.Tensor) -> torch.Tensor:
    """Laws [..., V] with `SHIFT` taken from the likeliest token, as far as it has that, and given to the second."""
    order = law.argsort(-1, descending=True)
    taken = law.amax(-1, keepdim=True).clamp(max=SHIFT)
    return law.scatter_add(-1, order[..., :1], -taken).scatter_add(-1, order[..., 1:2], taken)


def in_place(place: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Verification takes the law of one place of the block for another; trees have it in other rows."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = sampler.probabilities

        def probabilities(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
            law = right(logits, batch).clone()
            if place < law.shape[1] > 1:
                law[:, place] = shifted(law[:, place])
            return law

        monkeypatch.setattr(sampler, "probabilities", probabilities)

    return plant


def in_processor(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Requests that use the processor get another law, wherever they are in the batch."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        right = sampler.probabilities

        def probabilities(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
            law, column = right(logits, batch), getattr(batch, name)
            assert column is not None
            unused = (0.0, 1.0) if name in ("top_p", "repetition", "temperature") else (0.0,)
            used = torch.stack([column != value for value in unused]).all(0)
            return torch.where(used, shifted(law), law)

        monkeypatch.setattr(sampler, "probabilities", probabilities)

    return plant


def in_recovered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn in the place of a rejected draft has another law: not everything is allowed there."""
    right = mass.draw_of

    def draw_of(masses: torch.Tensor, allowed: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        law = masses / masses.sum(-1, keepdim=True)
        return right(torch.where(allowed.all(-1, keepdim=True), law, shifted(law)), allowed, uniform)

    monkeypatch.setattr(mass, "draw_of", draw_of)


def in_draft_probs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are drawn from one law and weighed by another."""
    right = base.draw
    monkeypatch.setattr(base, "draw", lambda law, *rest: right(shifted(law), *rest))


IN_ALL_REQUESTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Method]] = {
    "first": (in_place(0), "greedy"),
    "middle": (in_place(1), "greedy"),
    "bonus": (in_place(2), "greedy"),
    "bonus, drawn drafts": (in_place(2), "probabilistic"),
    "recovered": (in_recovered, "greedy"),
    "recovered, drawn drafts": (in_recovered, "probabilistic"),
}
IN_KINDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition": "repetition_penalty",
    "presence": "presence_penalty",
    "frequency": "frequency_penalty",
}
"""Columns of a sampling batch, and the kind of request that uses them."""


@pytest.mark.parametrize("fault", IN_ALL_REQUESTS)
def test_an_error_in_one_place_is_red(open_lane: OpenLane, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    plant, method = IN_ALL_REQUESTS[fault]
    plant(monkeypatch)
    lane = open_lane("STANDALONE")  # its law differs from the target's behind every token
    red = wrong(judged(lane, method, requests(lane, method, ["plain"])))
    places = {len(path) - 1 for kind, path in red if kind == "plain"}
    expected = {"first": {0}, "middle": {1}, "bonus": {2}}.get(fault.partition(",")[0], {0, 1})
    assert places == expected


@pytest.mark.parametrize("column", IN_KINDS)
def test_an_error_in_one_processor_is_red(open_lane: OpenLane, monkeypatch: pytest.MonkeyPatch, column: str) -> None:
    """And in no other request of the batch."""
    in_processor(column)(monkeypatch)
    lane = open_lane("EAGLE")
    red = wrong(judged(lane, "greedy", requests(lane, "greedy", ["plain", IN_KINDS[column]])))
    assert {kind for kind, _ in red} == {IN_KINDS[column]}


def test_drafts_drawn_from_another_law_than_they_are_weighed_by_are_red(
    open_lane: OpenLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_draft_probs(monkeypatch)
    lane = open_lane("EAGLE")
    with pytest.raises(AssertionError, match="drafted"):
        judged(lane, "probabilistic", requests(lane, "probabilistic", ["plain"]))
