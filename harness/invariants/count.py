"""COUNT-1: what was delivered, what was billed and what came beside it must be the same numbers."""

from __future__ import annotations

from functools import partial

from harness.contract import Completion, Delta, Request, Run, StepTrace
from harness.invariants.base import Key, Violation, blame, invariant
from harness.invariants.wellformed import sound_completions, sound_deltas, wanted_keys

_fault = partial(blame, "COUNT-1")


@invariant(
    "COUNT-1",
    statement="delivered tokens == usage.completion_tokens == logprob rows == hidden entries "
    "(one prefill block + completion_tokens - 1 rows)",
    needs={"completion"},
)
def count_1(run: Run) -> list[Violation]:
    """Also: prompt echoed and billed whole, one answer per sample, and what steps delivered adds up."""
    found, out = sound_completions("COUNT-1", run)
    deltas, flaws = sound_deltas("COUNT-1", run)
    out += flaws
    for request, key in wanted_keys(run):
        if key not in found:
            continue
        done = found[key]
        out += _usage(request, key, done, run.setup.prefix_cache)
        out += _logprobs(request, key, done) + _prompt_logprobs(request, key, done) + _hidden(request, key, done)
        if deltas:
            parts = deltas.get(key, [])
            out += _delivered_tokens(request, key, done, parts) + _delivered_rows(request, key, done, parts)
    return out


def _never_ran(done: Completion) -> bool:
    return done.finish_reason == "abort" and not done.token_ids


def _usage(request: Request, key: Key, done: Completion, cache: bool) -> list[Violation]:
    out = []
    prompt, echo, usage = tuple(request.prompt_token_ids), tuple(done.prompt_token_ids), done.usage
    if echo != prompt:
        out.append(_fault(key, "completion echoes another prompt", expected=prompt, got=echo))
    if usage.prompt_tokens != len(prompt):
        message = "usage.prompt_tokens differs from the prompt"
        out.append(_fault(key, message, expected=len(prompt), got=usage.prompt_tokens))
    if usage.completion_tokens != len(done.token_ids):
        message = "usage.completion_tokens differs from the tokens delivered"
        out.append(_fault(key, message, expected=len(done.token_ids), got=usage.completion_tokens))
    most = len(prompt) if cache else 0
    if not 0 <= usage.cached_tokens <= most:
        message = "usage.cached_tokens lies outside the prompt" if cache else "tokens are cached without a prefix cache"
        out.append(_fault(key, message, expected=f"0..{most}", got=usage.cached_tokens))
    return out


def _logprobs(request: Request, key: Key, done: Completion) -> list[Violation]:
    rows = None if done.logprobs is None else len(done.logprobs)
    if rows is None and (request.sampling.logprobs is None or _never_ran(done)):
        return []
    if rows == len(done.token_ids):
        return []
    message = "logprob rows differ from completion tokens"
    return [_fault(key, message, expected=len(done.token_ids), got="nothing" if rows is None else rows)]


def _prompt_logprobs(request: Request, key: Key, done: Completion) -> list[Violation]:
    rows, prompt_len = done.prompt_logprobs, len(request.prompt_token_ids)
    if rows is None:
        if request.sampling.prompt_logprobs is None or _never_ran(done):
            return []
        return [_fault(key, "prompt_logprobs are missing", expected=prompt_len, got="nothing")]
    out = []
    if len(rows) != prompt_len:
        message = "prompt logprob rows differ from prompt tokens"
        out.append(_fault(key, message, expected=prompt_len, got=len(rows)))
    for position, row in enumerate(rows):
        if (row is None) != (position == 0):
            message = "prompt logprob row is missing" if row is None else "nothing precedes the first prompt token"
            right = "a row" if row is None else "no row"
            out.append(_fault(key, message, position=position, row=position, expected=right, got=row or "nothing"))
    return out


def _hidden(request: Request, key: Key, done: Completion) -> list[Violation]:
    hidden, prompt_len = done.hidden_states, len(request.prompt_token_ids)
    if hidden is None:
        if not request.return_hidden_states or _never_ran(done):
            return []
        return [_fault(key, "hidden states are missing", expected=f"{len(done.token_ids)} entries", got="nothing")]
    out = []
    if hidden.prefill.shape[0] != prompt_len and not _never_ran(done):
        message = "rows of the prefill block differ from prompt tokens"
        out.append(_fault(key, message, expected=prompt_len, got=hidden.prefill.shape[0]))
    rows = max(len(done.token_ids) - 1, 0)
    if len(hidden.decode) != rows:
        message = "decode rows of hidden states differ from completion_tokens - 1"
        out.append(_fault(key, message, expected=rows, got=len(hidden.decode)))
    return out


def _delivered_tokens(
    request: Request, key: Key, done: Completion, parts: list[tuple[StepTrace, Delta]]
) -> list[Violation]:
    out = []
    sent, final = tuple(token_id for _, delta in parts for token_id in delta.token_ids), tuple(done.token_ids)
    if sent != final:
        row = next((i for i, (a, b) in enumerate(zip(sent, final, strict=False)) if a != b), min(len(sent), len(final)))
        message = "the tokens that steps delivered are not the completion"
        position = len(request.prompt_token_ids) + row
        out.append(_fault(key, message, position=position, row=row, expected=final, got=sent))
    ends = [place for place, (_, delta) in enumerate(parts) if delta.finished]
    if (ends and ends != [len(parts) - 1]) or (not ends and done.finish_reason != "abort"):
        message = "exactly the last delivery must say that the request finished"
        out.append(_fault(key, message, expected=[len(parts) - 1], got=ends))
    return out


def _delivered_rows(
    request: Request, key: Key, done: Completion, parts: list[tuple[StepTrace, Delta]]
) -> list[Violation]:
    out = []
    for step, delta in parts:
        due = request.sampling.logprobs is not None or bool(delta.logprobs)
        if due and len(delta.logprobs) != len(delta.token_ids):
            message = "logprob rows of one delivery differ from its tokens"
            got = len(delta.logprobs)
            out.append(_fault(key, message, step=step.step, expected=len(delta.token_ids), got=got))
    prefill = sum(delta.prefill_hidden.shape[0] for _, delta in parts if delta.prefill_hidden is not None)
    decode = sum(len(delta.decode_hidden) for _, delta in parts)
    right = (len(request.prompt_token_ids), max(len(done.token_ids) - 1, 0))
    due = request.return_hidden_states or prefill > 0 or decode > 0
    if due and (prefill, decode) != right and not _never_ran(done):
        message = "hidden rows that steps delivered (prefill, decode) differ from the tokens"
        out.append(_fault(key, message, expected=right, got=(prefill, decode)))
    return out
