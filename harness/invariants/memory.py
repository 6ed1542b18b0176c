"""ALIAS-2, static part: who shares whose memory, told by storage, offset and stride."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.contract import Run, TensorFacts
from harness.invariants.base import Key, Violation, blame, invariant
from harness.invariants.wellformed import sound_completions, sound_deltas

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "int16": 2, "uint8": 1}


@dataclass(frozen=True, slots=True)
class Result:
    """A delivered tensor: whose it is, which of its rows (the prefill block is entry 0; None is the mean of rows), and
    where it lies."""

    key: Key
    entry: int | None
    step: int | None
    facts: TensorFacts


def own_storage_flaw(facts: TensorFacts) -> str | None:
    """Why a tensor does not own its memory alone, or None.

    Told without another tensor: a stride of 0 makes several entries one; a storage larger than the tensor is a view,
    such as `[N, 2][:, :1]` of sampled tokens or a slice of the strided verify output.
    """
    if any(stride == 0 and size > 1 for stride, size in zip(facts.stride, facts.shape, strict=True)):
        return "has stride 0: several of its entries are one memory cell"
    item = ITEM_BYTES.get(facts.dtype)
    if item is not None and facts.storage_nbytes > math.prod(facts.shape) * item > 0:
        return "is a view of a larger storage"
    return None


@invariant(
    "ALIAS-2",
    statement="no writable storage is shared between requests' results, no result has stride 0, "
    "and overwriting one result changes nothing else, now or after later steps",
    needs={"completion"},
)
def alias_2(run: Run) -> list[Violation]:
    """Static part, over the tensors of deltas and completions (alive together, as `run` holds them) and over drafts."""
    found, out = sound_completions("ALIAS-2", run)
    deltas, flaws = sound_deltas("ALIAS-2", run)
    results = [
        Result(key, entry, None, TensorFacts.of(tensor))
        for key, done in found.items()
        if done.hidden_states is not None
        for entry, tensor in enumerate([done.hidden_states.prefill, *done.hidden_states.decode])
    ]
    results += [
        Result(key, None, None, TensorFacts.of(done.pooled_hidden))
        for key, done in found.items()
        if done.pooled_hidden is not None
    ]
    # The hidden entries of a request are fewer than its tokens, or as many: the next number is free.
    results += [
        Result(key, len(done.token_ids) + 1, None, TensorFacts.of(done.layer_states))
        for key, done in found.items()
        if done.layer_states is not None
    ]
    for key, parts in deltas.items():
        blocks, rows = 0, 0
        for step, delta in parts:
            if delta.prefill_hidden is not None:
                results.append(Result(key, -blocks, step.step, TensorFacts.of(delta.prefill_hidden)))
                blocks += 1
            for row in delta.decode_hidden:
                rows += 1
                results.append(Result(key, rows, step.step, TensorFacts.of(row)))
    return out + flaws + _alone(run, results) + _shared(results) + list(_drafts(run))


def _alone(run: Run, results: Iterable[Result]) -> list[Violation]:
    out = []
    for result in results:
        flaw = own_storage_flaw(result.facts)
        if flaw is not None:
            out.append(
                blame(
                    "ALIAS-2",
                    result.key,
                    f"delivered hidden state {flaw}",
                    step=result.step,
                    row=result.entry,
                    expected="a tensor that owns its storage",
                    got=result.facts,
                    origin=_verify_origin(run, result),
                )
            )
    return out


def _verify_origin(run: Run, result: Result) -> str | None:
    for step in run.steps:
        hidden = step.verify.hidden if step.verify is not None else None
        same = hidden is not None and (hidden.storage_ptr, hidden.storage_nbytes) == (
            result.facts.storage_ptr,
            result.facts.storage_nbytes,
        )
        if same and result.step in (None, step.step):
            return f"the strided verify output of step {step.step}"
    return None


def _shared(results: Iterable[Result]) -> list[Violation]:
    """Two results in one storage. An entry may be handed over twice: by the step, then with the completion."""
    owners: dict[int, Result] = {}
    out = []
    for result in results:
        if result.facts.storage_ptr == 0 or 0 in result.facts.shape:
            continue
        first = owners.setdefault(result.facts.storage_ptr, result)
        if (first.key, first.entry) != (result.key, result.entry):
            whose = "rows of one request" if first.key == result.key else "different requests' results"
            out.append(
                blame(
                    "ALIAS-2",
                    result.key,
                    f"storage is shared between {whose}",
                    step=result.step,
                    row=result.entry,
                    expected="a storage of its own",
                    got=result.facts,
                    origin=f"entry {first.entry} of request {first.key[0]!r} sample {first.key[1]}",
                )
            )
    return out


def _drafts(run: Run) -> Iterator[Violation]:
    for step in run.steps:
        propose = step.propose
        if propose is None or 0 in propose.facts.shape:
            continue
        flaw, origin = own_storage_flaw(propose.facts), None
        if propose.sampled is not None and propose.sampled.storage_ptr == propose.facts.storage_ptr != 0:
            flaw, origin = "shares storage with the sampled tokens", "the sampled tokens given to propose"
        if flaw is not None:
            yield Violation(
                invariant="ALIAS-2",
                step=step.step,
                message=f"the tensor returned by propose {flaw}",
                expected="a tensor that owns its storage",
                got=propose.facts,
                origin=origin,
            )
