"""Sorting sound completions from nonsense, once for all families: types, missing answers, answers twice, strangers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import get_args

import torch

from harness.contract import (
    Completion,
    Delta,
    FinishReason,
    HiddenStates,
    LogprobRow,
    Request,
    Run,
    StepTrace,
    Usage,
)
from harness.invariants.base import Key, Violation, blame

Sound = tuple[dict[Key, Completion], list[Violation]]


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_ids(value: object) -> bool:
    return isinstance(value, tuple | list) and all(is_int(item) for item in value)


def is_number(value: object) -> bool:
    return isinstance(value, float) or is_int(value)


def is_logprob_row(value: object) -> bool:
    return (
        isinstance(value, LogprobRow)
        and is_int(value.token_id)
        and is_number(value.logprob)
        and (value.rank is None or is_int(value.rank))
        and isinstance(value.top, tuple | list)
        and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in value.top)
        and all(is_int(token_id) and is_number(logprob) for token_id, logprob in value.top)
    )


def is_row(value: object, width: int | None = None) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 1 and width in (None, value.shape[0])


def is_hidden(value: object) -> bool:
    if not isinstance(value, HiddenStates) or not isinstance(value.prefill, torch.Tensor) or value.prefill.ndim != 2:
        return False
    width = value.prefill.shape[1]
    return isinstance(value.decode, tuple | list) and all(is_row(row, width) for row in value.decode)


def _is_usage(value: object) -> bool:
    return isinstance(value, Usage) and all(
        is_int(count) for count in (value.prompt_tokens, value.completion_tokens, value.cached_tokens)
    )


def _is_rows(value: object) -> bool:
    return isinstance(value, tuple | list) and all(is_logprob_row(row) for row in value)


def _is_prompt_rows(value: object) -> bool:
    return isinstance(value, tuple | list) and all(row is None or is_logprob_row(row) for row in value)


_FIELDS: dict[str, tuple[Callable[[object], bool], bool, str]] = {
    "prompt_token_ids": (is_ids, False, "a tuple of integers"),
    "token_ids": (is_ids, False, "a tuple of integers"),
    "finish_reason": (lambda value: value in get_args(FinishReason), False, f"one of {get_args(FinishReason)}"),
    "usage": (_is_usage, False, "a Usage of integers"),
    "text": (lambda value: isinstance(value, str), True, "a string"),
    "logprobs": (_is_rows, True, "a tuple of LogprobRow with integer ids and ranks"),
    "prompt_logprobs": (_is_prompt_rows, True, "a tuple of LogprobRow or None"),
    "hidden_states": (is_hidden, True, "HiddenStates: a matrix and vectors of its width"),
    "pooled_hidden": (is_row, True, "a vector"),
    "layer_states": (lambda value: isinstance(value, torch.Tensor) and value.ndim == 3, True, "a tensor of 3 dims"),
    "accept_lens": (is_ids, True, "a tuple of integers"),
    "draft_lens": (is_ids, True, "a tuple of integers"),
}
"""Field -> (test, may be None, what is right)."""


def describe(value: object) -> object:
    """A value fit for a violation: plain and comparable, tensors as their type and shape."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} tensor of shape {list(value.shape)}"
    if isinstance(value, HiddenStates):
        return f"prefill: {describe(value.prefill)}, decode: {describe(value.decode)}"
    if isinstance(value, tuple | list):
        return [describe(item) for item in value[:8]] + ["..."] * (len(value) > 8)
    return repr(value)


def _flaws(invariant: str, completion: Completion, arm: str) -> list[Violation]:
    return [
        blame(
            invariant,
            (completion.request_id, completion.index),
            f"{arm}completion.{name} is not of the right type",
            expected=right,
            got=describe(getattr(completion, name)),
        )
        for name, (test, optional, right) in _FIELDS.items()
        if not (optional and getattr(completion, name) is None) and not test(getattr(completion, name))
    ]


def wanted_keys(run: Run) -> Iterator[tuple[Request, Key]]:
    """Every (request, key) that the run must answer, in order."""
    for request in run.requests:
        for index in range(request.sampling.n):
            yield request, (request.request_id, index)


def sound_completions(invariant: str, run: Run, *, arm: str = "") -> Sound:
    """Well-formed completions by key, and a violation for each that is malformed, missing, doubled or foreign.

    `arm` prefixes the messages ("baseline: "), so that a failing control arm is not blamed on the run under test.
    """
    wanted = dict.fromkeys(key for _, key in wanted_keys(run))
    sound: dict[Key, Completion] = {}
    out: list[Violation] = []
    seen: set[Key] = set()
    for completion in run.completions:
        if not isinstance(completion, Completion):
            out.append(Violation(invariant=invariant, message=f"{arm}not a completion", got=describe(completion)))
            continue
        key = (completion.request_id, completion.index)
        flaws = _flaws(invariant, completion, arm)
        if key not in wanted:
            flaws = [blame(invariant, key, f"{arm}completion of a request or sample that nobody asked for")]
        elif key in seen:
            flaws = [blame(invariant, key, f"{arm}request answered twice")]
        seen.add(key)
        if not flaws:
            sound[key] = completion
        out += flaws
    out += [blame(invariant, key, f"{arm}no completion for this request") for key in wanted if key not in seen]
    return sound, out


def _is_delta(delta: object) -> bool:
    return (
        isinstance(delta, Delta)
        and is_ids(delta.token_ids)
        and (delta.prefill_hidden is None or isinstance(delta.prefill_hidden, torch.Tensor))
        and isinstance(delta.decode_hidden, tuple | list)
        and all(isinstance(row, torch.Tensor) for row in delta.decode_hidden)
        and _is_rows(delta.logprobs)
    )


def sound_deltas(invariant: str, run: Run) -> tuple[dict[Key, list[tuple[StepTrace, Delta]]], list[Violation]]:
    """Well-formed deltas by key in order of delivery, and a violation for each malformed one."""
    found: dict[Key, list[tuple[StepTrace, Delta]]] = {}
    out: list[Violation] = []
    for step in run.steps:
        for delta in step.deltas:
            if _is_delta(delta):
                found.setdefault((delta.request_id, delta.index), []).append((step, delta))
            else:
                who = getattr(delta, "request_id", None)
                message = "a step delivered something that is not a Delta of ids, tensors and logprob rows"
                out.append(
                    Violation(invariant=invariant, step=step.step, request_id=who, message=message, got=repr(delta))
                )
    return found, out
