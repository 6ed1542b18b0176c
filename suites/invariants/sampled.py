"""Fabricated runs of sampled requests: rejection sampling of chains against a law of four tokens, faults on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from harness.contract import (
    PLACEHOLDER,
    Capabilities,
    Completion,
    DrafterSetup,
    EngineSetup,
    Request,
    Run,
    SamplingParams,
    StepTrace,
    Usage,
    VerifyTrace,
)

Floats = NDArray[np.float64]
VOCAB, K = 4, 2
LAWS = np.array([[0.1, 0.6, 0.3, 0.0], [0.2, 0.1, 0.7, 0.0], [0.65, 0.25, 0.1, 0.0], [0.5, 0.3, 0.2, 0.0]])
"""[V current, V next]; token 3 never comes."""
Fault = Callable[[str, int, Floats], Floats]
"""(kind of draw, place in the block, right law) -> law that is drawn from."""


def law(request: Request, output: tuple[int, ...]) -> Floats:
    return np.asarray(LAWS[(*request.prompt_token_ids, *output)[-1]])


def honest(_kind: str, _place: int, right: Floats) -> Floats:
    return right


def moved(right: Floats, by: float) -> Floats:
    """`by` moved from the likeliest token to the next."""
    best, second = np.argsort(-right, kind="stable")[:2]
    wrong = right.copy()
    wrong[best] -= by
    wrong[second] += by
    return wrong


def ask(request_id: str, max_new_tokens: int, **sampling: Any) -> Request:
    params = SamplingParams(**{"temperature": 1.0, "max_new_tokens": max_new_tokens, **sampling})
    return Request(request_id=request_id, prompt_token_ids=(0,), sampling=params)


def complete(request: Request, tokens: tuple[int, ...], **known: Any) -> Completion:
    return Completion(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tokens,
        finish_reason="length",
        usage=Usage(len(request.prompt_token_ids), len(tokens)),
        **known,
    )


def run_of(requests: tuple[Request, ...], completions: tuple[Completion, ...], **known: Any) -> Run:
    setup = EngineSetup(target=Path("/nowhere"), drafter=DrafterSetup.chain("scripted", K))
    claims = Capabilities(engine="fabricated", version="0", drafters=frozenset(), features=frozenset())
    return Run(setup=setup, capabilities=claims, requests=requests, completions=completions, **known)


def sampled_run(rng: np.random.Generator, num_tokens: int, fault: Fault = honest, request_id: str = "plain/0") -> Run:
    """One request, its drafts always the likeliest tokens, its every step in the trace."""
    request = ask(request_id, num_tokens)

    def draw(kind: str, place: int, right: Floats) -> int:
        return int(np.searchsorted(fault(kind, place, right).cumsum(), rng.random(), side="right"))

    tokens = [draw("prefill", -1, LAWS[0])]
    steps, accept_lens = [], []
    while len(tokens) < num_tokens:
        drafts = [int(LAWS[tokens[-1]].argmax())]
        drafts += [int(LAWS[drafts[0]].argmax())]
        block = list(_block(tokens[-1], drafts, fault, draw, rng))
        tokens += block
        accept_lens.append(len(block))
        emitted = torch.tensor([block + [PLACEHOLDER] * (K + 1 - len(block))])
        verify = VerifyTrace(
            request_ids=(request_id,),
            num_draft_tokens=K + 1,
            draft_token_ids=torch.tensor([drafts]),
            accept_lens=(len(block),),
            emitted=emitted,
            discarded=(False,),
        )
        steps.append(StepTrace(step=len(steps), kind="decode", verify=verify))
    lens = {"accept_lens": tuple(accept_lens), "draft_lens": (K,) * len(accept_lens)}
    return run_of((request,), (complete(request, tuple(tokens[:num_tokens]), **lens),), steps=tuple(steps))


def _block(
    last: int, drafts: list[int], fault: Fault, draw: Callable[[str, int, Floats], int], rng: np.random.Generator
) -> Iterator[int]:
    for place, draft in enumerate(drafts):
        right = LAWS[last]
        if rng.random() < fault("place", place, right)[draft]:
            yield draft
            last = draft
            continue
        rest = np.where(np.arange(VOCAB) == draft, 0.0, fault("place", place, right))
        yield draw("recovered", place, rest / rest.sum())
        return
    yield draw("place", len(drafts), LAWS[last])
