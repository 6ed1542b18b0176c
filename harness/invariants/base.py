"""What every invariant shares: how a violation reads, how it is raised, and the registry of the catalogue.

An invariant is a pure function over observations (`harness.contract`) that returns `list[Violation]`. It is registered
in one line with `@invariant(id, statement=..., needs=...)`; further functions of the same id leave the statement out.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ParamSpec

from harness.contract import Run

P = ParamSpec("P")

Key = tuple[str, int]
"""(request id, sample index)."""

OBSERVED = frozenset(
    {"completion", "hidden", "logprobs", "accept_lens", "trace", "propose", "verify", "pages", "snapshots", "aux"}
    | {"counters", "grammar", "layer_states", "pooled"}
)
"""What a run may offer. Other needs ("baseline", "known_answer", "runs") come as arguments."""

SHOWN = 5
"""Violations that are rendered in full when a check fails; the rest are only counted."""


class Misuse(ValueError):
    """A check was asked for something that it cannot judge: a fault of the caller, not of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One broken statement.

    `position` counts from 0 over prompt and output together. `row` is the 0-based index into the sequence at fault
    (output token, logprob row, hidden entry, accept length, batch row, page). `expected` and `got` are plain values,
    never tensors. `origin` says where the wrong value came from, when a known answer can tell.
    """

    invariant: str
    message: str
    request_id: str | None = None
    index: int | None = None
    step: int | None = None
    position: int | None = None
    row: int | None = None
    expected: object = None
    got: object = None
    origin: str | None = None

    @property
    def where(self) -> str:
        """Who and where, in one phrase: `request 'a' sample 1, step 3, position 9, row 2`."""
        sample = f" sample {self.index}" if self.index else ""
        who = [f"request {self.request_id!r}{sample}"] if self.request_id is not None else []
        places = {"step": self.step, "position": self.position, "row": self.row}
        return ", ".join(who + [f"{name} {value}" for name, value in places.items() if value is not None]) or "the run"

    def render(self) -> str:
        """Several lines: id and message, then where, expected, got and origin as far as they are known."""
        lines = [f"{self.invariant}: {self.message}", f"  where:    {self.where}"]
        if self.expected is not None or self.got is not None:
            lines += [f"  expected: {shorten(self.expected)}", f"  got:      {shorten(self.got)}"]
        if self.origin is not None:
            lines.append(f"  origin:   {self.origin}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()


def blame(
    invariant_id: str,
    key: Key,
    message: str,
    *,
    step: int | None = None,
    position: int | None = None,
    row: int | None = None,
    expected: object = None,
    got: object = None,
    origin: str | None = None,
) -> Violation:
    """A violation by one sample of one request."""
    return Violation(
        invariant=invariant_id,
        request_id=key[0],
        index=key[1],
        message=message,
        step=step,
        position=position,
        row=row,
        expected=expected,
        got=got,
        origin=origin,
    )


def shorten(value: object, limit: int = 200) -> str:
    """`repr` of a value, cut in the middle beyond `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 3 :]}"


class InvariantError(AssertionError):
    """At least one invariant is broken. `violations` holds them all, `reproducer` the command that shows it again."""

    def __init__(self, violations: Sequence[Violation], reproducer: str | None = None) -> None:
        self.violations = tuple(violations)
        self.reproducer = reproducer
        broken = ", ".join(dict.fromkeys(violation.invariant for violation in violations))
        total = len(self.violations)
        parts = [f"{total} violation{'s' if total > 1 else ''} of {broken}"]
        parts += [violation.render() for violation in self.violations[:SHOWN]]
        if total > SHOWN:
            parts.append(f"... and {total - SHOWN} more")
        if reproducer is not None:
            parts.append(f"reproduce: {reproducer}")
        super().__init__("\n".join(parts))


def leaves(error: BaseException) -> Iterator[BaseException]:
    """hypothesis reports several faults of one test as a group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def broken(error: BaseException, asked: Sequence[str]) -> Iterator[str]:
    """The invariants that an error speaks of; those that were asked for, when it is none of ours."""
    for one in leaves(error):
        if isinstance(one, InvariantError):
            yield from (violation.invariant for violation in one.violations)
        else:
            yield from asked


def check(violations: Iterable[Violation], reproducer: str | None = None) -> None:
    """Raise `InvariantError` unless `violations` is empty."""
    found = list(violations)
    if found:
        raise InvariantError(found, reproducer)


@dataclass(frozen=True, slots=True)
class Check:
    """One function of an invariant. `alone` says that a single run is all it must be given."""

    name: str
    function: Callable[..., list[Violation]]
    needs: frozenset[str]
    alone: bool


@dataclass(frozen=True, slots=True)
class Invariant:
    """One row of the catalogue. `needs` is what its first check needs; every check carries its own."""

    id: str
    statement: str
    checks: tuple[Check, ...]

    @property
    def needs(self) -> frozenset[str]:
        return self.checks[0].needs


_REGISTRY: dict[str, Invariant] = {}
INVARIANTS: Mapping[str, Invariant] = MappingProxyType(_REGISTRY)
"""The catalogue, by id. Filled when `harness.invariants` is imported."""


def invariant(
    invariant_id: str, *, needs: Iterable[str], statement: str | None = None
) -> Callable[[Callable[P, list[Violation]]], Callable[P, list[Violation]]]:
    """Register a check. A run that lacks a needed observation, and nonsense that no rule foresaw, become violations."""
    wanted = frozenset(needs)

    def register(function: Callable[P, list[Violation]]) -> Callable[P, list[Violation]]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> list[Violation]:
            signature.bind(*args, **kwargs)
            lacking = _lacking(invariant_id, wanted, args)
            if lacking:
                return lacking
            try:
                return function(*args, **kwargs)
            except Misuse:
                raise
            except Exception as error:  # an engine's nonsense must fail this check and leave the others running
                return [_unjudged(invariant_id, error)]

        _add(invariant_id, statement, Check(function.__name__, guarded, wanted, _alone(signature)))
        return guarded

    return register


def _add(invariant_id: str, statement: str | None, check_: Check) -> None:
    known = _REGISTRY.get(invariant_id)
    if known is None:
        if statement is None:
            raise ValueError(f"invariant {invariant_id!r}: the first check of an invariant must give its statement")
        _REGISTRY[invariant_id] = Invariant(invariant_id, statement, (check_,))
    else:
        _REGISTRY[invariant_id] = Invariant(invariant_id, known.statement, (*known.checks, check_))


def _alone(signature: inspect.Signature) -> bool:
    required = [name for name, parameter in signature.parameters.items() if parameter.default is parameter.empty]
    return required == ["run"]


def _lacking(invariant_id: str, needs: frozenset[str], args: Sequence[object]) -> list[Violation]:
    run = args[0] if args else None
    if not isinstance(run, Run):
        return []
    missing = sorted((needs & OBSERVED) - offers(run))
    message = "nothing to judge: the run does not offer {!r}; ask for it, or select checks with `applicable`"
    return [Violation(invariant=invariant_id, message=message.format(name)) for name in missing]


def _unjudged(invariant_id: str, error: Exception) -> Violation:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = f"the observations are nonsense and could not be judged: {type(error).__name__}: {error}"
    return Violation(invariant=invariant_id, message=message, origin=f"{frame.name}, line {frame.lineno}")


def offers(run: Run) -> frozenset[str]:
    """The observations that a run offers. What a request asked for counts as offered: its absence is a violation."""
    asked_logprobs = any(
        request.sampling.logprobs is not None or request.sampling.prompt_logprobs is not None
        for request in run.requests
    )
    steps = run.steps if isinstance(run.steps, tuple | list) else ()
    present = {
        "completion": True,
        "hidden": any(request.return_hidden_states for request in run.requests),
        "pooled": any(request.pooled_hidden is not None for request in run.requests),
        "logprobs": asked_logprobs,
        "layer_states": run.setup.drafter is not None and len(run.setup.drafter.aux_layer_ids) > 0,
        "grammar": any(
            request.sampling.regex is not None or request.sampling.json_schema is not None for request in run.requests
        ),
        "accept_lens": any(getattr(done, "accept_lens", None) is not None for done in run.completions),
        "counters": run.counters is not None,
        "trace": len(steps) > 0,
        "propose": any(getattr(step, "propose", None) is not None for step in steps),
        "verify": any(getattr(step, "verify", None) is not None for step in steps),
        "pages": any(getattr(step, "pages", None) is not None for step in steps),
        "snapshots": any(_filled(getattr(step, "snapshots", ())) for step in steps),
        "aux": any(getattr(step, "aux_hidden_rows", None) is not None for step in steps),
    }
    return frozenset(name for name, there in present.items() if there)


def _filled(value: object) -> bool:
    """Whether a tuple holds anything; what is no tuple counts, so that its check reports it."""
    return not isinstance(value, tuple | list) or len(value) > 0


def applicable(run: Run) -> Iterator[tuple[Invariant, Check]]:
    """The checks that need one run only and whose needs this run offers, in order of registration."""
    offered = offers(run)
    for known in INVARIANTS.values():
        for check_ in known.checks:
            if check_.alone and check_.needs <= offered:
                yield known, check_


def judge(run: Run) -> list[Violation]:
    """Every applicable single-run check on one run; what two checks of one invariant both find is told once."""
    found = [violation for _, check_ in applicable(run) for violation in check_.function(run)]
    return list({violation.render(): violation for violation in found}.values())
