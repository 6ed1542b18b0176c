"""The drafter lanes: the columns of the scorecard. To add one: a line in `LANES`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from harness.contract import DrafterSetup, EngineFactory, EngineSetup, Script
from harness.engines import engine_factory
from harness.engines.isolated import IsolatedFactory
from harness.invariants.base import INVARIANTS
from harness.known_answer.drafters.extract_hidden_states import AUX_LAYER_IDS
from harness.known_answer.drafters.ngram import PROMPT_LOOKUP_MAX, PROMPT_LOOKUP_MIN

AT_THE_DOOR = {
    "CONF-1": "every drafter x feature cell passes or is refused at start-up",
    "CONF-2": "a checkpoint that does not fit is refused at start-up; nothing ever runs with a weight left at its "
    "initial value",
}
"""Invariants about starting an engine: there is no run that a function could judge."""

DraftMethod = Literal["greedy", "probabilistic"]
"""How the drafts of sampled requests are chosen: `DrafterSetup.draft_sample_method`."""

NEEDS_DRAFTS = frozenset({"SHAPE-1", "COUNT-2", "ACCEPT-1", "ACCEPT-2"})
NEEDS_AUX = frozenset({"STATE-2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLane:
    """One drafter. A chain unless `topk` > 1.

    `folder` names the drafter of a known-answer family, which is its closed form, too. `scripted`: its drafts are
    given by a script, by default that closed form, and no checkpoint is loaded. `within_target`: the drafter's
    checkpoint holds the target as well. `aux`: the drafter reads auxiliary hidden states of the target.
    `without_checkpoint`: there is nothing to load, and so no drafter that equals the target either. What ACCEPT-2 says
    of such a one is asked of texts that make this drafter right every time; that acceptance must not drift is asked as
    ever. `max_k`: the longest chain that there is. `own_positions`: its rows have positions, which may end before those
    of the target. `options`: further fields of `DrafterSetup`.
    """

    name: str
    method: str | None
    folder: str = ""
    topk: int = 1
    scripted: bool = False
    within_target: bool = False
    aux: bool = False
    without_checkpoint: bool = False
    max_k: int | None = None
    own_positions: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speculative(self) -> bool:
        return self.method is not None

    @property
    def loads_checkpoint(self) -> bool:
        """Whether the drafter has a checkpoint of its own."""
        return self.speculative and not (self.scripted or self.within_target or self.without_checkpoint)

    @property
    def keeps_layers(self) -> bool:
        """Whether completions come with `layer_states`."""
        return "aux_layer_ids" in self.options

    @property
    def may_equal_target(self) -> bool:
        """Whether a family can hold a drafter that is always right."""
        return self.speculative and not self.without_checkpoint

    @property
    def has_weights(self) -> bool:
        """Whether there are weights of the drafter, in whichever checkpoint."""
        return self.loads_checkpoint or self.within_target

    @property
    def draws(self) -> bool:
        """Whether drafts of sampled requests can be drawn: a tree takes the best, a script and a text have no law."""
        return self.speculative and self.topk == 1 and not (self.scripted or self.without_checkpoint)

    def applies(self, invariant: str) -> bool:
        """Whether the invariant says anything about this drafter."""
        if invariant in NEEDS_AUX:
            return self.aux
        return self.speculative or invariant not in NEEDS_DRAFTS

    def target_folder(self) -> str:
        return self.folder if self.within_target else "target"

    def drafter(
        self, k: int, family: Path, script: Script | None, draft_sample_method: DraftMethod = "greedy"
    ) -> DrafterSetup | None:
        """k drafts in a chain; or a tree, k deep, of `topk * k` nodes: fewer than it could have, so some are cut."""
        if self.method is None:
            return None
        k = k if self.max_k is None else min(k, self.max_k)
        return DrafterSetup(
            method=self.method,
            model=family / self.folder if self.loads_checkpoint else None,
            num_steps=k,
            topk=self.topk,
            num_draft_tokens=1 + self.topk * k,
            draft_sample_method=draft_sample_method,
            script=script,
            **self.options,
        )


LANES = {
    lane.name: lane
    for lane in (
        DrafterLane(name="none", method=None),
        DrafterLane(name="STANDALONE", method="STANDALONE", folder="standalone"),
        DrafterLane(name="EAGLE", method="EAGLE", folder="eagle"),
        DrafterLane(name="EAGLE3", method="EAGLE3", folder="eagle3", aux=True),
        DrafterLane(name="MTP", method="MTP", folder="mtp", within_target=True),
        DrafterLane(name="MEDUSA", method="MEDUSA", folder="medusa", own_positions=False),
        DrafterLane(name="FROZEN_KV_MTP", method="FROZEN_KV_MTP", folder="frozen_kv_mtp", own_positions=False),
        DrafterLane(name="DFLASH", method="DFLASH", folder="dflash", aux=True),
        DrafterLane(name="EAGLE-tree", method="EAGLE", folder="eagle", topk=2),
        DrafterLane(name="CUSTOM", method="CUSTOM", folder="standalone", scripted=True),
        DrafterLane(
            name="NGRAM",
            method="NGRAM",
            folder="ngram",
            without_checkpoint=True,
            options={"prompt_lookup_min": PROMPT_LOOKUP_MIN, "prompt_lookup_max": PROMPT_LOOKUP_MAX},
        ),
        DrafterLane(
            name="EXTRACT",
            method="EXTRACT_HIDDEN_STATES",
            folder="extract_hidden_states",
            aux=True,
            without_checkpoint=True,
            max_k=1,
            options={"aux_layer_ids": AUX_LAYER_IDS},
        ),
    )
}


def taken(engine: str) -> list[str]:
    """The lanes whose drafter an engine in another process claims."""
    factory = factory_of(engine)
    assert isinstance(factory, IsolatedFactory)
    claimed = factory.dialect.capabilities("", EngineSetup(target=Path())).drafters
    return [name for name, lane in LANES.items() if lane.method is None or lane.method in claimed]


def catalogue() -> list[str]:
    """Ids of the invariants that the conformance suite must cover."""
    return sorted({*INVARIANTS, *AT_THE_DOOR})


@cache
def factory_of(engine: str) -> EngineFactory:
    """A registered engine, or `module:factory` naming a class of somebody's own (docs/adapters.md). One for all lanes
    of a process: a factory may keep engines.

    Raises ValueError naming the engine when there is none.
    """
    module, _, factory = engine.partition(":")
    if not factory:
        return engine_factory(engine)
    try:
        made: EngineFactory = getattr(import_module(module), factory)()
    except (ImportError, AttributeError) as error:
        mend = "give module:factory, a class that starts engines: docs/adapters.md"
        raise ValueError(f"engine={engine!r}: {error}; {mend}") from error
    return made
