"""What is done to a running engine: scripts of actions that must not change any result, and a strategy for more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from hypothesis import strategies as st

from harness.contract import Action, Request
from harness.contract.request import ActionName

Life = tuple[Action, ...]


def _life(*actions: tuple[int, ActionName]) -> Life:
    return tuple(Action(step=step, name=name) for step, name in actions)


def _preempt_all(requests: Iterable[Request], step: int) -> Life:
    owners = (f"{r.request_id}#{index}" for r in requests for index in range(r.sampling.n))
    return tuple(Action(step=step, name="preempt", value=owner) for owner in owners)


LIVES: dict[str, Callable[[tuple[Request, ...], int], Life]] = {
    "preempt": lambda requests, at: _preempt_all(requests, at),
    "pause": lambda _, at: _life((at, "pause"), (at + 3, "resume")),
    "reset_prefix_cache": lambda _, at: _life((at, "reset_prefix_cache")),
    "sleep": lambda _, at: _life((at, "sleep"), (at + 2, "wake")),
    "sleep_paused": lambda _, at: _life((at, "pause"), (at + 1, "sleep"), (at + 2, "wake"), (at + 3, "resume")),
    "reload_target": lambda _, at: _life((at, "reload_target")),
    "reload_drafter": lambda _, at: _life((at, "reload_drafter")),
    "reload_paused": lambda _, at: _life((at, "pause"), (at, "reload_target"), (at + 2, "resume")),
}
"""By name: (requests, first step) -> actions. Each leaves the engine as it was."""


def one_after_another(requests: tuple[Request, ...], names: Iterable[str], start: int, gap: int) -> Life:
    """Each of the named scripts, `gap` steps of work apart."""
    life: Life = ()
    for name in names:
        part = LIVES[name](requests, start)
        life += part
        start = part[-1].step + gap
    return life


def lives(requests: tuple[Request, ...], names: Collection[str]) -> st.SearchStrategy[Life]:
    """Up to three of the named scripts one after the other."""
    chosen = st.lists(st.sampled_from(sorted(names)), min_size=1, max_size=3)
    return st.builds(one_after_another, st.just(requests), chosen, st.integers(0, 6), st.integers(1, 4))
