"""Scripted drafters: the worst that a drafter may hand to verification, as pure functions of the committed tokens.

Each script is a frozen callable with the signature of `contract.Script`. It depends on its arguments only, so a batch,
a preemption or a replay gets the same drafts, and hypothesis and reproducers can print it. `Continue` is the closed
form of the target: `(tokens, n) -> the n tokens that greedy decoding appends`, always exactly n of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from harness.contract import PLACEHOLDER, Script

Continue = Callable[[tuple[int, ...], int], tuple[int, ...]]


def wrong_token(right: int, vocab_size: int) -> int:
    """An id inside the vocabulary that is not `right`."""
    return (right + 1) % vocab_size


def accept_exactly(continue_: Continue, vocab_size: int, tokens: tuple[int, ...], accepted: int, k: int) -> list[int]:
    """k drafts of which exactly the first `accepted` (0..k) are right.

    The first wrong draft is followed by what the target would say after it: every later draft agrees with its own row
    of the verify logits, so a verifier that counts matches instead of the leading run accepts too many.
    """
    if accepted >= k:
        return list(continue_(tokens, k))
    right = continue_(tokens, accepted + 1)
    head = (*right[:accepted], wrong_token(right[accepted], vocab_size))
    return [*head, *continue_((*tokens, *head), k - accepted - 1)]


@dataclass(frozen=True)
class AlwaysRight:
    """Every draft is what the target will say: each verify step accepts all k."""

    continue_: Continue

    def __call__(self, _request_id: str, tokens: tuple[int, ...], k: int) -> Sequence[int]:
        return self.continue_(tokens, k)


@dataclass(frozen=True)
class AlwaysWrong:
    """The first draft is wrong and the rest follow from it: each verify step emits the bonus token only."""

    continue_: Continue
    vocab_size: int

    def __call__(self, _request_id: str, tokens: tuple[int, ...], k: int) -> Sequence[int]:
        return accept_exactly(self.continue_, self.vocab_size, tokens, 0, k)


@dataclass(frozen=True)
class WrongAtFirst:
    """Only position 0 is wrong; positions 1..k-1 hold the true continuation, which must not be accepted either."""

    continue_: Continue
    vocab_size: int

    def __call__(self, _request_id: str, tokens: tuple[int, ...], k: int) -> Sequence[int]:
        right = self.continue_(tokens, k)
        return [wrong_token(right[0], self.vocab_size), *right[1:]]


@dataclass(frozen=True)
class Constant:
    """The same id k times. With the EOS id it tempts a verifier to finish a request that the target goes on with."""

    token_id: int

    def __call__(self, _request_id: str, _tokens: tuple[int, ...], k: int) -> Sequence[int]:
        return [self.token_id] * k


@dataclass(frozen=True)
class RightThenConstant:
    """`right` true drafts, then one id repeated: an EOS or an out-of-range id behind an accepted run."""

    continue_: Continue
    right: int
    token_id: int

    def __call__(self, _request_id: str, tokens: tuple[int, ...], k: int) -> Sequence[int]:
        keep = min(self.right, k)
        return [*self.continue_(tokens, keep), *[self.token_id] * (k - keep)]


@dataclass(frozen=True)
class Silent:
    """No drafts at some steps (an empty list or k placeholders), right ones at the others."""

    continue_: Continue
    seed: int

    def __call__(self, request_id: str, tokens: tuple[int, ...], k: int) -> Sequence[int]:
        return _rng(self.seed, request_id, tokens).choice([(), (PLACEHOLDER,) * k, self.continue_(tokens, k)])


@dataclass(frozen=True)
class RandomLength:
    """0..k drafts, of which a random number is right: ragged draft lengths and ragged accept lengths in one batch."""

    continue_: Continue
    vocab_size: int
    seed: int

    def __call__(self, request_id: str, tokens: tuple[int, ...], k: int) -> Sequence[int]:
        rng = _rng(self.seed, request_id, tokens)
        drafts = accept_exactly(self.continue_, self.vocab_size, tokens, rng.randint(0, k), k)
        return drafts[: rng.randint(0, k)]


@dataclass(frozen=True)
class OutOfRange:
    """Ids that no embedding has, at every position in turn, between right drafts."""

    continue_: Continue
    vocab_size: int

    def __call__(self, _request_id: str, tokens: tuple[int, ...], k: int) -> Sequence[int]:
        bad = (self.vocab_size, -2, self.vocab_size + 1000, 2**31 - 1, -(2**31))
        drafts = list(self.continue_(tokens, k))
        drafts[len(tokens) % k] = bad[len(tokens) % len(bad)]
        return drafts


@dataclass(frozen=True)
class Alternating:
    """All right and all wrong in turn, by the parity of the committed length."""

    continue_: Continue
    vocab_size: int

    def __call__(self, _request_id: str, tokens: tuple[int, ...], k: int) -> Sequence[int]:
        return accept_exactly(self.continue_, self.vocab_size, tokens, k if len(tokens) % 2 else 0, k)


@dataclass(frozen=True)
class AcceptPattern:
    """Makes given accept lengths happen; see `accept_pattern`."""

    continue_: Continue
    vocab_size: int
    prompt_lens: tuple[tuple[str, int], ...]
    patterns: tuple[tuple[str, tuple[int, ...]], ...]

    def __call__(self, request_id: str, tokens: tuple[int, ...], k: int) -> Sequence[int]:
        emitted = len(tokens) - dict(self.prompt_lens)[request_id]
        accept_len = _rest_of_block(dict(self.patterns)[request_id], emitted)
        return accept_exactly(self.continue_, self.vocab_size, tokens, min(accept_len - 1, k), k)


def accept_pattern(
    continue_: Continue,
    vocab_size: int,
    prompt_lens: Mapping[str, int],
    patterns: Mapping[str, Sequence[int]],
) -> AcceptPattern:
    """A script whose verify steps accept `patterns[request_id]`, again and again from the start.

    Accept lengths are correct drafts + 1 and must lie in 1..k+1. The first new token comes from prefill and belongs to
    no block. A request that is resumed inside a block gets the rest of that block first. Raises ValueError on an
    accept length below 1.
    """
    for request_id, pattern in patterns.items():
        if not pattern or min(pattern) < 1:
            raise ValueError(f"patterns[{request_id!r}]={pattern!r}: give one or more accept lengths, each at least 1")
    return AcceptPattern(
        continue_,
        vocab_size,
        tuple(sorted(prompt_lens.items())),
        tuple((request_id, tuple(pattern)) for request_id, pattern in sorted(patterns.items())),
    )


def _rest_of_block(pattern: tuple[int, ...], emitted: int) -> int:
    """Tokens from `emitted` (>= 1) to the end of the block that it falls into."""
    inside = (emitted - 1) % sum(pattern)
    return next(end - inside for end in accumulate(pattern) if end > inside)


def _rng(seed: int, request_id: str, tokens: tuple[int, ...]) -> Random:
    return Random(f"{seed}/{request_id}/{len(tokens)}/{tokens[-1]}")


def hostile_drafters(continue_: Continue, vocab_size: int, eos_token_id: int) -> dict[str, Script]:
    """Every hostile drafter by name, for one target."""
    return {
        "always_right": AlwaysRight(continue_),
        "always_wrong": AlwaysWrong(continue_, vocab_size),
        "wrong_at_first": WrongAtFirst(continue_, vocab_size),
        "constant": Constant(0),
        "constant_last": Constant(vocab_size - 1),
        "eos": Constant(eos_token_id),
        "eos_after_right": RightThenConstant(continue_, 1, eos_token_id),
        "placeholder": Constant(PLACEHOLDER),
        "silent": Silent(continue_, 11),
        "random_length": RandomLength(continue_, vocab_size, 12),
        "out_of_range": OutOfRange(continue_, vocab_size),
        "too_big_after_right": RightThenConstant(continue_, 1, vocab_size),
        "negative_after_right": RightThenConstant(continue_, 1, -7),
        "alternating": Alternating(continue_, vocab_size),
    }
