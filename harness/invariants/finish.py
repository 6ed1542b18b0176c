"""FINISH: where a request ends, and why, does not depend on how many tokens a step yields."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial

from harness.contract import Completion, Request, Run
from harness.invariants.base import Key, Misuse, Violation, blame, invariant
from harness.invariants.checkpoint import eos_token_ids as stored_eos
from harness.invariants.compare import Pair, Terms, compare, first_difference, paired, token_at
from harness.invariants.wellformed import sound_completions, wanted_keys

Detokenize = Callable[[tuple[int, ...]], str]
"""Token ids of an output -> its text."""

_fault = partial(blame, "FINISH-1")


def stop_ids(request: Request, eos: Collection[int]) -> frozenset[int]:
    """The ids that end this request: its own, and the end-of-sequence ids unless it ignores them."""
    return frozenset(request.sampling.stop_token_ids) | (frozenset() if request.sampling.ignore_eos else frozenset(eos))


def can_run_dry(request: Request) -> bool:
    """Whether its masks may come to leave no token to choose: then nobody but the engine can end it, by an abort."""
    sampling = request.sampling
    grammar = sampling.regex is not None or sampling.json_schema is not None
    banned = sampling.bad_words or any(bias == -math.inf for _, bias in sampling.logit_bias)
    return grammar or bool(banned or sampling.allowed_token_ids)


def stop_string_cut(request: Request, tokens: tuple[int, ...], detokenize: Detokenize) -> int | None:
    """Where in the text of `tokens` the first stop string begins, or None.

    A match counts when it ends beyond the text of the first min_new_tokens tokens, as stops do.
    """
    least = request.sampling.min_new_tokens
    text, guarded = detokenize(tokens), len(detokenize(tokens[:least])) if least else 0
    cuts = [text.find(word, max(guarded - len(word) + 1, 0)) for word in request.sampling.stop]
    return min((cut for cut in cuts if cut >= 0), default=None)


@invariant(
    "FINISH-1",
    statement="tokens and finish reason equal the non-spec run for every (stop position, length cap, block size) "
    "in every order inside one block; nothing follows the first stop",
    needs={"completion", "baseline"},
)
def finish_1(
    run: Run,
    baseline: Run,
    eos_token_ids: Collection[int] | None = None,
    detokenize: Detokenize | None = None,
) -> list[Violation]:
    """Compare the greedy requests with `baseline`, and apply the rules that need no baseline (`finish_1_alone`)."""
    pairs, flaws = paired("FINISH-1", run, baseline, "baseline")
    terms = Terms.of(run, "baseline")
    out = [violation for pair in pairs for violation in compare("FINISH-1", pair, terms)]
    alone = finish_1_alone(run, eos_token_ids, detokenize)
    return out + [violation for violation in flaws if violation not in alone] + alone


@invariant("FINISH-1", needs={"completion"})
def finish_1_alone(
    run: Run, eos_token_ids: Collection[int] | None = None, detokenize: Detokenize | None = None
) -> list[Violation]:
    """Rules for one run: nothing follows the first stop, caps hold, and the reason is that of the last token.

    `eos_token_ids` is read from the target's configuration when not given. With `detokenize`, stop strings are looked
    for in the whole output, and the text must be cut before the first.
    """
    eos = stored_eos(run) if eos_token_ids is None else frozenset(eos_token_ids)
    found, out = sound_completions("FINISH-1", run)
    for request, key in wanted_keys(run):
        if key in found:
            done = found[key]
            out += _stops(run, request, key, done, eos)
            out += _caps(run, request, key, done)
            out += _reason(run, request, key, done, eos, detokenize)
            unspelt = frozenset() if run.capabilities.stop_ids_in_text else stop_ids(request, eos)
            out += _strings(request, key, done, unspelt, detokenize)
    return out


def _stops(run: Run, request: Request, key: Key, done: Completion, eos: frozenset[int]) -> list[Violation]:
    ids, tokens, start = stop_ids(request, eos), done.token_ids, len(done.prompt_token_ids)
    out = []
    first = next((row for row, token_id in enumerate(tokens) if token_id in ids), None)
    if first is not None and first < len(tokens) - 1:
        message = f"tokens follow the first stop (id {tokens[first]} at output token {first})"
        row, right = first + 1, f"the end after {first + 1} tokens"
        out.append(_fault(key, message, position=start + row, row=row, expected=right, got=tuple(tokens[row:])))
    if request.sampling.ignore_eos and run.capabilities.ignore_eos == "ban":
        for row, token_id in enumerate(tokens):
            if token_id in eos and token_id not in request.sampling.stop_token_ids:
                message = "ignore_eos bans the end-of-sequence token in this engine, yet it was emitted"
                out.append(_fault(key, message, position=start + row, row=row, expected="another token", got=token_id))
    return out


def _caps(run: Run, request: Request, key: Key, done: Completion) -> list[Violation]:
    out = []
    cap, room = request.sampling.max_new_tokens, run.setup.context_length - len(request.prompt_token_ids)
    for limit, message in (
        (cap, "more tokens than max_new_tokens"),
        (room, "more tokens than the context has room for"),
    ):
        if len(done.token_ids) > max(limit, 0):
            start, row = len(request.prompt_token_ids), max(limit, 0)
            got = len(done.token_ids)
            out.append(_fault(key, message, position=start + row, row=row, expected=f"at most {limit}", got=got))
    if not done.token_ids and done.finish_reason != "abort":
        out.append(_fault(key, "finished without a token", expected="at least 1", got=0))
    return out


def _reason(
    run: Run, request: Request, key: Key, done: Completion, eos: frozenset[int], detokenize: Detokenize | None
) -> list[Violation]:
    """The reason follows from the last token: a stop wins over a length cap that falls on the same token."""
    reason, tokens = done.finish_reason, tuple(done.token_ids)
    full = len(request.prompt_token_ids) + len(tokens) >= run.setup.context_length - 1
    at_cap = len(tokens) >= request.sampling.max_new_tokens or full
    stopped = bool(tokens) and tokens[-1] in stop_ids(request, eos)
    unseen = bool(request.sampling.stop) and detokenize is None  # a stop string may have matched, unseen by us
    matched = detokenize is not None and stop_string_cut(request, tokens, detokenize) is not None
    last = token_at(tokens, len(tokens) - 1) if tokens else "no token"
    if reason == "abort":
        if request.abort_step is None and not can_run_dry(request):
            return [_fault(key, "finish reason is abort, though nobody aborted the request", expected="stop or length")]
        return []
    if reason == "stop" and not (stopped or matched or unseen):
        message = "finish reason is stop, but the output does not end in a stop"
        return [_fault(key, message, row=len(tokens) - 1, expected=sorted(stop_ids(request, eos)), got=last)]
    if reason == "length" and (stopped or matched):
        message = "finish reason is length, but the last token completes a stop"
        return [_fault(key, message, row=len(tokens) - 1, expected="stop", got="length")]
    if reason == "length" and not at_cap:
        message = "finish reason is length, though there was room for more tokens"
        return [_fault(key, message, expected=request.sampling.max_new_tokens, got=len(tokens))]
    return []


def _strings(
    request: Request, key: Key, done: Completion, unspelt: frozenset[int], detokenize: Detokenize | None
) -> list[Violation]:
    """The text ends before the stop string; the token that completed it is the last one. A last token of `unspelt` is
    not in the text, and completes nothing there."""
    words, tokens, out = request.sampling.stop, tuple(done.token_ids), []
    seen = [word for word in words if done.text is not None and word in done.text]
    if seen and request.sampling.min_new_tokens == 0:
        out.append(_fault(key, "the text holds a stop string", expected=f"cut before {seen[0]!r}", got=done.text))
    if detokenize is None or not words or done.finish_reason == "abort":
        return out
    if stop_string_cut(request, tokens[:-1], detokenize) is not None:
        message = "tokens follow the one that completed a stop string"
        out.append(_fault(key, message, row=len(tokens) - 1, expected="the end", got=detokenize(tokens)))
    spelt = tokens[:-1] if tokens and tokens[-1] in unspelt else tokens
    cut = stop_string_cut(request, spelt, detokenize)
    if (cut is not None or spelt != tokens) and done.text is not None and done.text != detokenize(spelt)[:cut]:
        message = "the text is not the output cut before the first stop string"
        out.append(_fault(key, message, expected=detokenize(spelt)[:cut], got=done.text))
    return out


@invariant(
    "FINISH-2",
    statement="the output for cap m is the prefix of the output for any larger cap; min_new_tokens holds exactly; "
    "stop strings across block borders",
    needs={"completion", "baseline"},
)
def finish_2(short: Run, long: Run, eos_token_ids: Collection[int] | None = None) -> list[Violation]:
    """`short` and `long` ran the same requests, `long` with larger (or equal) `max_new_tokens`."""
    pairs, out = paired("FINISH-2", short, long, "run with the larger cap", seeded=True)
    caps = {request.request_id: request.sampling.max_new_tokens for request in long.requests}
    for pair in pairs:
        cap, larger = pair.request.sampling.max_new_tokens, caps[pair.request.request_id]
        if larger < cap:
            raise Misuse(
                f"max_new_tokens={larger} of {pair.request.request_id!r}: must be at least {cap}; swap the runs"
            )
        if not pair.cut:
            out += _prefix(pair, cap)
    return out + finish_2_alone(short, eos_token_ids) + finish_2_alone(long, eos_token_ids)


def _prefix(pair: Pair, cap: int) -> list[Violation]:
    got, whole = pair.got, pair.right
    fault = partial(blame, "FINISH-2", pair.key)
    right = tuple(whole.token_ids[:cap])
    row = first_difference(got.token_ids, right)
    if row is not None:
        message = f"the output for max_new_tokens={cap} is not the prefix of the output for a larger cap"
        start = len(got.prompt_token_ids)
        return [
            fault(
                message, position=start + row, row=row, expected=token_at(right, row), got=token_at(got.token_ids, row)
            )
        ]
    # Masks that leave nothing behind the last token are not met where the cap ends the output first.
    ended = len(whole.token_ids) <= cap - (whole.finish_reason == "abort")
    reason = whole.finish_reason if ended else "length"
    out = []
    if got.finish_reason != reason:
        message = f"finish reason for max_new_tokens={cap} does not follow from the output for a larger cap"
        out.append(fault(message, expected=reason, got=got.finish_reason))
    if got.text is not None and whole.text is not None:
        fits = got.text == whole.text if ended else got.text.startswith(whole.text) or whole.text.startswith(got.text)
        if not fits:
            message = f"text for max_new_tokens={cap} is not the beginning of the text for a larger cap"
            out.append(fault(message, expected=whole.text, got=got.text))
    return out


@invariant("FINISH-2", needs={"completion"})
def finish_2_alone(run: Run, eos_token_ids: Collection[int] | None = None) -> list[Violation]:
    """min_new_tokens: no stop id among the first min_new_tokens, and no finish before them."""
    eos = stored_eos(run) if eos_token_ids is None else frozenset(eos_token_ids)
    found, out = sound_completions("FINISH-2", run)
    for request, key in wanted_keys(run):
        if key not in found or request.sampling.min_new_tokens == 0:
            continue
        done, least = found[key], request.sampling.min_new_tokens
        fault = partial(blame, "FINISH-2", key)
        start, banned = len(request.prompt_token_ids), stop_ids(request, eos)
        for row, token_id in enumerate(done.token_ids[:least]):
            if token_id in banned:
                message = f"a stop id was emitted before min_new_tokens={least}"
                out.append(fault(message, position=start + row, row=row, expected="no stop id", got=token_id))
        if len(done.token_ids) < least and done.finish_reason != "abort":
            room = run.setup.context_length - start - 1
            if not (done.finish_reason == "length" and len(done.token_ids) >= room):
                message = "finished before min_new_tokens"
                out.append(fault(message, expected=f"at least {least}", got=len(done.token_ids)))
    return out


@invariant("FINISH-2", needs={"completion", "baseline"})
def finish_2_minimum(run: Run, free: Run, eos_token_ids: Collection[int] | None = None) -> list[Violation]:
    """`free` ran the same requests with min_new_tokens=0: a minimum that an output passes by itself changes nothing."""
    if any(request.sampling.min_new_tokens for request in free.requests):
        raise Misuse("free: has requests with min_new_tokens; it must be the run without")
    eos = stored_eos(run) if eos_token_ids is None else frozenset(eos_token_ids)
    pairs, out = paired("FINISH-2", run, free, "run without min_new_tokens")
    for pair in pairs:
        sampling, got, right = pair.request.sampling, pair.got, pair.right
        least = sampling.min_new_tokens
        met = not {*right.token_ids[:least]} & {*eos, *sampling.stop_token_ids} and right.finish_reason != "abort"
        if pair.cut or not met or (right.finish_reason == "stop" and len(right.token_ids) <= least):
            continue
        fault = partial(blame, "FINISH-2", pair.key)
        row = first_difference(got.token_ids, right.token_ids)
        if row is not None:
            message = f"min_new_tokens={least} changes an output that is longer without it"
            a, b = token_at(got.token_ids, row), token_at(right.token_ids, row)
            out.append(fault(message, position=len(got.prompt_token_ids) + row, row=row, expected=b, got=a))
        elif got.finish_reason != right.finish_reason:
            message = f"min_new_tokens={least} changes the finish reason of an output that is longer without it"
            out.append(fault(message, expected=right.finish_reason, got=got.finish_reason))
    return out
