"""ALIAS-2, dynamic part: overwrite what was delivered and see whether anything else notices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from harness.contract import Delta, HiddenStates, Run, StepTrace
from harness.invariants.base import Key, Violation, blame, invariant
from harness.invariants.compare import Pair, Terms, compare, paired
from harness.invariants.rows import plain, row_errors, show_difference


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """One delivered tensor: the clone taken on delivery, and the canary that it is filled with."""

    key: Key
    step: int
    prefill: bool
    tensor: torch.Tensor
    clone: torch.Tensor
    canary: float

    @property
    def intact(self) -> bool:
        return bool((self.tensor == self.canary).all())

    def __str__(self) -> str:
        what = "prefill block" if self.prefill else "decode row"
        return f"{what} of request {self.key[0]!r} sample {self.key[1]} delivered at step {self.step}"


def canary(number: int) -> float:
    """A value far from any activation, exact in bfloat16; values repeat after 10,240 numbers."""
    return -(128.0 + number % 128) * 2.0 ** (8 + number // 128 % 80)


class Scribbler:
    """Pass it as `on_step`: it clones every delivered tensor, overwrites it, and watches it from then on.

    `violations` collects what was seen on the way: a tensor that cannot be written, two that share cells, a canary that
    changed in a later step. `hidden_states` gives back the clones.
    """

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self._marks: list[_Mark] = []
        self._watched: list[_Mark] = []

    def __call__(self, step: StepTrace) -> None:
        self._watch(step.step, "a later step changed a result that had been delivered")
        fresh = self._clone(step)
        self._watched += [mark for mark in fresh if self._overwrite(mark)]
        self._watch(step.step, "overwriting one result changed another")

    def finish(self) -> list[Violation]:
        """Look once more after the run; all violations so far."""
        self._watch(None, "a result changed after the last step")
        return self.violations

    def hidden_states(self, key: Key) -> HiddenStates | None:
        """What the request was given, as cloned on delivery; None when nothing was."""
        mine = [mark for mark in self._marks if mark.key == key]
        blocks = [mark.clone for mark in mine if mark.prefill]
        if not blocks:
            return None
        return HiddenStates(torch.cat(blocks), tuple(mark.clone for mark in mine if not mark.prefill))

    def owner_of(self, row: torch.Tensor) -> _Mark | None:
        """The delivery whose canary fills a row."""
        return next((mark for mark in self._marks if bool((row == mark.canary).all())), None)

    def _clone(self, step: StepTrace) -> list[_Mark]:
        fresh: list[_Mark] = []
        for delta in step.deltas:
            if not isinstance(delta, Delta) or not isinstance(delta.decode_hidden, tuple | list):
                continue  # nonsense is for COUNT-1 to report, not to end the run
            blocks = [] if delta.prefill_hidden is None else [delta.prefill_hidden]
            for place, tensor in enumerate([*blocks, *delta.decode_hidden]):
                if not isinstance(tensor, torch.Tensor):
                    continue
                value = canary(len(self._marks) + len(fresh))
                key, prefill = (delta.request_id, delta.index), place < len(blocks)
                fresh.append(_Mark(key, step.step, prefill, tensor, tensor.detach().clone(), value))
        self._marks += fresh
        return fresh

    def _overwrite(self, mark: _Mark) -> bool:
        try:
            with torch.inference_mode():  # the one mode that may write to inference tensors and to leaves alike
                mark.tensor.copy_(torch.full_like(mark.clone, mark.canary))  # refuses stride 0, as fill_ does not
        except RuntimeError as error:
            message = f"a delivered hidden state cannot be written: {str(error).splitlines()[0]}"
            self.violations.append(blame("ALIAS-2", mark.key, message, step=mark.step, got=tuple(mark.tensor.stride())))
            return False
        return True

    def _watch(self, step: int | None, message: str) -> None:
        broken = [mark for mark in self._watched if not mark.intact]
        for mark in broken:
            values = mark.tensor.flatten()[:4]
            writer = next((self.owner_of(value) for value in values if value != mark.canary), None)
            self.violations.append(
                blame(
                    "ALIAS-2",
                    mark.key,
                    f"{message}: the {mark}",
                    step=step,
                    expected=mark.canary,
                    got=values.tolist(),
                    origin=None if writer is None else f"it shares memory with the {writer}",
                )
            )
        if broken:
            self._watched = [mark for mark in self._watched if mark not in broken]


@invariant("ALIAS-2", needs={"hidden"})
def alias_2_scribbled(run: Run, scribbled: Run, scribbler: Scribbler) -> list[Violation]:
    """Dynamic part: `scribbled` ran the requests of `run` with `scribbler` as `on_step`, and nothing may differ.

    Tokens, text, finish, logprobs and accept lengths must be equal, the clones must be the hidden states of `run`, and
    a hidden row of a scribbled completion must be either right or wholly overwritten by its own canary.
    """
    out = list(scribbler.finish())
    pairs, flaws = paired("ALIAS-2", scribbled, run, "run that nobody scribbled on", seeded=True)
    terms = Terms.of(run, "run that nobody scribbled on", accept_lens=True)
    for pair in pairs:
        clones = scribbler.hidden_states(pair.key)
        out += compare("ALIAS-2", replace(pair, got=replace(pair.got, hidden_states=clones)), terms)
        out += _kept_rows(pair, scribbler, terms)
    return out + flaws


def _kept_rows(pair: Pair, scribbler: Scribbler, terms: Terms) -> list[Violation]:
    kept, truths = pair.got.hidden_states, pair.right.hidden_states
    if kept is None or truths is None:
        return []
    out = []
    rows = zip([*kept.prefill, *kept.decode], [*truths.prefill, *truths.decode], strict=False)
    for row, (mine, truth) in enumerate(rows):
        owner = scribbler.owner_of(mine)
        if owner is not None and owner.key == pair.key:
            continue
        same = mine.shape == truth.shape
        errors = row_errors(plain(mine).unsqueeze(0), plain(truth).unsqueeze(0)) if same else None
        if errors is None or not float(errors[0]) <= terms.row_tolerance:
            message = "hidden row of the completion is neither right nor overwritten by its own user"
            origin = None if owner is None else f"it was overwritten through the {owner}"
            shapes = f"shape {list(truth.shape)}", f"shape {list(mine.shape)}"
            right, got_row = show_difference(truth, mine) if same else shapes
            out.append(blame("ALIAS-2", pair.key, message, row=row, expected=right, got=got_row, origin=origin))
    return out
