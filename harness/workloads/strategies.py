"""hypothesis strategies: ragged batches of requests and the engine set-ups that they run under.

A request asks for at most `MAX_NEW_TOKENS` tokens, because each example runs a real engine. Stop ids and stop
strings are taken from what the target will really say, so that requests do stop, at every place of a block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from hypothesis import strategies as st

from harness.contract import Action, Request, SamplingParams
from harness.workloads.vocabulary import Vocabulary

MAX_NEW_TOKENS = 14
MAX_REQUESTS = 6


@dataclass(frozen=True, repr=False)
class Batch:
    """Requests, the draft length k, and the `EngineSetup` fields that differ from the lane's defaults."""

    requests: tuple[Request, ...]
    k: int
    changes: tuple[tuple[str, Any], ...] = ()
    warm: bool = False
    """Run the same requests once before, on the same engine: the prefix cache is then warm."""

    @property
    def setup(self) -> dict[str, Any]:
        return dict(self.changes)

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """hypothesis prints a failing example through this."""
        printer.text(repr(self))

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        requests = "".join(f"\n  {brief(request)}," for request in self.requests)
        return f"Batch(k={self.k}, changes={self.changes}, warm={self.warm}, requests=({requests}\n))"


def brief(value: Request | SamplingParams | Action) -> str:
    """Its `repr` without what is at its default."""
    parts = []
    for field in fields(value):
        here = getattr(value, field.name)
        if here != field.default:
            parts.append(f"{field.name}={brief(here) if isinstance(here, SamplingParams) else repr(here)}")
    return f"{type(value).__name__}({', '.join(parts)})"


def prompt_lengths() -> st.SearchStrategy[int]:
    """1..40, with the short ones, where drafters have nothing to start from, as often as the rest."""
    return st.one_of(st.integers(1, 4), st.integers(1, 40))


@st.composite
def prompts(draw: st.DrawFn, vocabulary: Vocabulary, trunk: tuple[int, ...] = ()) -> tuple[int, ...]:
    """A length and a seed, which is quicker to draw and to shrink than tokens; may begin with a part of `trunk`."""
    shares: bool = draw(st.booleans())
    if trunk and shares:
        tail = vocabulary.prompt(draw(st.integers(0, 3)), draw(st.integers(0, 999)))
        return trunk[: draw(st.integers(1, len(trunk)))] + tail
    return vocabulary.prompt(draw(prompt_lengths()), draw(st.integers(0, 999)))


@st.composite
def finishes(
    draw: st.DrawFn, vocabulary: Vocabulary, prompt: tuple[int, ...], max_new_tokens: int, *, strings: bool
) -> dict[str, Any]:
    """Sampling fields that end a request: stop ids, stop strings, min_new_tokens, ignore_eos."""
    stream = vocabulary.continue_(prompt, max_new_tokens)
    ordinary = [token for token in stream if token != vocabulary.eos_token_id] or [vocabulary.ordinary[0]]
    fields: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if draw(st.booleans()):
        fields["stop_token_ids"] = tuple(draw(st.lists(st.sampled_from(ordinary), min_size=1, max_size=2, unique=True)))
    if strings and draw(st.booleans()):
        start = draw(st.integers(0, len(ordinary) - 1))
        fields["stop"] = (vocabulary.text(tuple(ordinary[start : start + draw(st.integers(1, 3))])),)
    if draw(st.booleans()):
        fields["min_new_tokens"] = draw(st.integers(0, max_new_tokens))
    fields["ignore_eos"] = draw(st.booleans())
    return fields


@st.composite
def processors(draw: st.DrawFn, vocabulary: Vocabulary) -> dict[str, Any]:
    """Penalties, bias and masks: they make the choice depend on what was emitted, also inside a block. Bad words are
    steps that the target would take."""
    token = st.sampled_from(vocabulary.ordinary)
    return draw(
        st.fixed_dictionaries(
            {},
            optional={
                "repetition_penalty": st.sampled_from((0.8, 1.3, 2.0)),
                "presence_penalty": st.sampled_from((-1.5, 0.7, 2.0)),
                "frequency_penalty": st.sampled_from((-1.0, 0.4, 2.0)),
                "logit_bias": st.lists(
                    st.tuples(token, st.sampled_from((-40.0, -3.0, 4.0, 25.0))),
                    min_size=1,
                    max_size=2,
                    unique_by=lambda pair: pair[0],
                ).map(tuple),
                "bad_words": st.lists(
                    token.map(lambda token_id: vocabulary.continue_((token_id,), 2)), min_size=1, max_size=3
                ).map(tuple),
                "allowed_token_ids": st.lists(token, min_size=8, max_size=20, unique=True).map(tuple),
            },
        )
    )


def observations() -> st.SearchStrategy[dict[str, Any]]:
    """Logprobs of the output and of the prompt."""
    return st.fixed_dictionaries(
        {"logprobs": st.sampled_from((None, None, 0, 3)), "prompt_logprobs": st.sampled_from((None, None, None, 2))}
    )


@st.composite
def request(
    draw: st.DrawFn, vocabulary: Vocabulary, request_id: str, trunk: tuple[int, ...], *, mixed: bool, timed: bool
) -> Request:
    """One greedy request. `mixed` draws flags, `timed` arrivals and aborts."""
    prompt = draw(prompts(vocabulary, trunk))
    max_new_tokens = draw(st.integers(1, MAX_NEW_TOKENS))
    fields: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if mixed:
        fields = draw(finishes(vocabulary, prompt, max_new_tokens, strings=True))
        fields |= draw(st.one_of(st.just({}), processors(vocabulary)))
        fields |= draw(observations())
        fields["n"] = draw(st.sampled_from((1, 1, 1, 2)))
    arrival = draw(st.integers(0, 6)) if timed else 0
    abort = draw(st.one_of(st.none(), st.integers(arrival, arrival + 8))) if timed else None
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**fields),
        return_hidden_states=mixed and draw(st.booleans()),
        num_speculative_tokens=draw(st.sampled_from((None, None, None, 0, 2))) if mixed else None,
        arrival_step=arrival,
        abort_step=abort,
    )


@st.composite
def ragged(
    draw: st.DrawFn, vocabulary: Vocabulary, *, mixed: bool = True, timed: bool = False, least: int = 1
) -> tuple[Request, ...]:
    """`least`..6 requests r0, r1, ... of different lengths, half of the time with shared prefixes."""
    size = draw(st.integers(least, MAX_REQUESTS))
    trunk = draw(st.one_of(st.just(()), prompts(vocabulary)))
    return tuple(draw(request(vocabulary, f"r{i}", trunk, mixed=mixed, timed=timed)) for i in range(size))


def schedules() -> st.SearchStrategy[dict[str, Any]]:
    """Fields of `EngineSetup` that must not change any result."""
    return st.fixed_dictionaries(
        {},
        optional={
            "page_size": st.sampled_from((1, 4, 16)),
            "chunk_size": st.sampled_from((3, 5, 8, 16)),
            "overlap": st.booleans(),
            "prefix_cache": st.booleans(),
            "max_running": st.integers(2, 8),
            "batch_buckets": st.sampled_from(((), (1, 2, 4, 8), (8,), (3, 8))),
        },
    )


def tight_pool(requests: tuple[Request, ...], page_size: int, k: int, slack: int) -> int:
    """Pages that let the longest request run alone, and `slack` more: a batch must preempt.

    Room for four blocks behind its cap: engines keep some for the block that the cap cuts, the next one and a tree.
    """
    longest = max(len(r.prompt_token_ids) + r.sampling.max_new_tokens for r in requests)
    return -(-(longest + 4 * (k + 1)) // page_size) + slack


@st.composite
def batches(
    draw: st.DrawFn,
    vocabulary: Vocabulary,
    *,
    mixed: bool = True,
    timed: bool = False,
    least: int = 1,
    scheduled: bool = True,
    max_k: int = 5,
) -> Batch:
    """A ragged batch, k in 1..max_k and, when `scheduled`, page size, chunks, overlap, buckets and a small pool."""
    requests = draw(ragged(vocabulary, mixed=mixed, timed=timed and draw(st.booleans()), least=least))
    k = draw(st.integers(1, max_k))
    if not scheduled:
        return Batch(requests, k)
    changes = draw(schedules())
    if draw(st.booleans()):
        changes["num_pages"] = tight_pool(requests, changes.get("page_size", 16), k, draw(st.integers(0, 4)))
    return Batch(requests, k, tuple(sorted(changes.items())), warm=draw(st.sampled_from((False, False, True))))
