"""The catalogue: pure functions over observations, one file per family, all alike.

`INVARIANTS` holds every check by id; `check` raises what a check returned; `judge` runs all that one run is enough for.
"""

from __future__ import annotations

from harness.invariants.accept import accept_1, accept_2, accept_2_drift
from harness.invariants.alias import alias_1, alias_1_layers
from harness.invariants.base import (
    INVARIANTS,
    Check,
    Invariant,
    InvariantError,
    Misuse,
    Violation,
    applicable,
    check,
    invariant,
    judge,
    offers,
)
from harness.invariants.count import count_1
from harness.invariants.counters import count_2, count_2_blocks
from harness.invariants.equal import equal_1, equal_2
from harness.invariants.finish import finish_1, finish_1_alone, finish_2, finish_2_alone, finish_2_minimum
from harness.invariants.gram import gram_1
from harness.invariants.kv import kv_1, kv_1_poison
from harness.invariants.law import law_1, law_2, law_3, law_3_independent
from harness.invariants.logp import LOGP_TOLERANCE, logp_1
from harness.invariants.memory import alias_2
from harness.invariants.pooled import alias_1_pooled
from harness.invariants.sched import sched_1, sched_2, sched_2_first, sched_3
from harness.invariants.scribble import Scribbler, alias_2_scribbled
from harness.invariants.shape import shape_1, shape_2
from harness.invariants.state import state_1, state_2

__all__ = [
    "INVARIANTS",
    "LOGP_TOLERANCE",
    "Check",
    "Invariant",
    "InvariantError",
    "Misuse",
    "Scribbler",
    "Violation",
    "accept_1",
    "accept_2",
    "accept_2_drift",
    "alias_1",
    "alias_1_layers",
    "alias_1_pooled",
    "alias_2",
    "alias_2_scribbled",
    "applicable",
    "check",
    "count_1",
    "count_2",
    "count_2_blocks",
    "equal_1",
    "equal_2",
    "finish_1",
    "finish_1_alone",
    "finish_2",
    "finish_2_alone",
    "finish_2_minimum",
    "gram_1",
    "invariant",
    "judge",
    "kv_1",
    "kv_1_poison",
    "law_1",
    "law_2",
    "law_3",
    "law_3_independent",
    "logp_1",
    "offers",
    "sched_1",
    "sched_2",
    "sched_2_first",
    "sched_3",
    "shape_1",
    "shape_2",
    "state_1",
    "state_2",
]
