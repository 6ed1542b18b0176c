"""Where a request must end, read off the endless stream that the target would go on emitting.

A stop wins over a length cap that falls on the same token. The token that stops is part of the token ids and not of the
text; a stop string is cut out of the text, and the token that completed it stays in the token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from harness.contract import Completion, FinishReason, Request, SamplingParams, Usage

Detokenize = Callable[[tuple[int, ...]], str]


@dataclass(frozen=True, slots=True)
class Finish:
    """Token ids, why they end, and the text (None without a detokenizer)."""

    token_ids: tuple[int, ...]
    reason: FinishReason
    text: str | None = None


def finish(
    stream: Iterable[int],
    params: SamplingParams,
    *,
    eos_token_ids: Collection[int] = (),
    detokenize: Detokenize | None = None,
    room: int | None = None,
    runs_dry: bool = False,
) -> Finish:
    """End a stream as `params` say.

    `stream` holds at least as many tokens as the cap, chosen by the sampler: min_new_tokens is its business, so a stop
    id before it is an error here. Stop strings count once they end beyond the text of the first min_new_tokens tokens.
    `room` is how many output tokens the context has room for. With `runs_dry` the stream may end, since masks left
    nothing to choose: an abort. Raises ValueError when the stream ends or stops too early, or when stop strings come
    without `detokenize`.
    """
    if params.stop and detokenize is None:
        raise ValueError(f"stop={params.stop!r}: needs a detokenizer; pass `detokenize`")
    cap = params.max_new_tokens if room is None else min(params.max_new_tokens, room)
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
    tokens: tuple[int, ...] = ()
    for token_id in stream:
        if token_id in stops and len(tokens) < params.min_new_tokens:
            raise ValueError(
                f"stream[{len(tokens)}]={token_id}: a stop id before min_new_tokens={params.min_new_tokens}; mask it"
            )
        tokens = (*tokens, token_id)
        cut = None if detokenize is None else stop_string_cut(tokens, params, detokenize)
        if cut is not None and detokenize is not None:
            return Finish(tokens, "stop", detokenize(tokens)[:cut])
        if token_id in stops:
            return Finish(tokens, "stop", None if detokenize is None else detokenize(tokens[:-1]))
        if len(tokens) >= cap:
            return Finish(tokens, "length", None if detokenize is None else detokenize(tokens))
    if runs_dry:
        return Finish(tokens, "abort", None if detokenize is None else detokenize(tokens))
    raise ValueError(f"stream of {len(tokens)} tokens: must reach a stop or {cap} tokens; give a longer one")


def stop_string_cut(tokens: tuple[int, ...], params: SamplingParams, detokenize: Detokenize) -> int | None:
    """Where in the text of `tokens` the first stop string that counts begins, or None."""
    if not params.stop:
        return None
    text = detokenize(tokens)
    least = params.min_new_tokens
    guarded = len(detokenize(tokens[:least])) if least else 0
    cuts = [text.find(word, max(guarded - len(word) + 1, 0)) for word in params.stop]
    return min((cut for cut in cuts if cut >= 0), default=None)


def greedy_stream(
    next_token: Callable[[tuple[int, ...]], int], prompt: tuple[int, ...], limit: int = 10_000
) -> Iterator[int]:
    """The first `limit` tokens of the greedy continuation: `next_token` of prompt and output, over and over."""
    tokens = prompt
    for _ in range(limit):
        token_id = next_token(tokens)
        tokens = (*tokens, token_id)
        yield token_id


def expected_completion(
    request: Request,
    stream: Iterable[int],
    *,
    eos_token_ids: Collection[int] = (),
    detokenize: Detokenize | None = None,
    context_length: int | None = None,
    runs_dry: bool = False,
) -> Completion:
    """What a request must come to: a `Completion` to put into a baseline `Run`. Not for requests that are aborted."""
    prompt = request.prompt_token_ids
    room = None if context_length is None else context_length - len(prompt)
    end = finish(
        stream, request.sampling, eos_token_ids=eos_token_ids, detokenize=detokenize, room=room, runs_dry=runs_dry
    )
    return Completion(
        request_id=request.request_id,
        prompt_token_ids=prompt,
        token_ids=end.token_ids,
        finish_reason=end.reason,
        usage=Usage(len(prompt), len(end.token_ids)),
        text=end.text,
    )
