"""An adapter in one file: greedy decoding with a draft model, made of two models of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from harness.contract import Action, Capabilities, Completion, EngineSetup, OnStep, Refused, Request, Run, Usage

FEATURES = frozenset({"stop_token_ids"})
ALWAYS = {"request_id", "prompt_token_ids", "sampling", "max_new_tokens"}


class ToyFactory:
    name = "toy"

    def start(self, setup: EngineSetup) -> ToyEngine:
        drafter = setup.drafter
        if drafter is not None and (drafter.method != "STANDALONE" or drafter.topk > 1):
            raise Refused(f"drafter {drafter.method}, topk={drafter.topk}: only chains of STANDALONE are drafted")
        if drafter is not None and drafter.draft_sample_method != "greedy":
            raise Refused(f"draft_sample_method={drafter.draft_sample_method!r}: drafts are greedy")
        if setup.dtype != "float32" or setup.batch_buckets or setup.snapshots or setup.kernels != "auto":
            raise Refused("dtype, batch_buckets, snapshots, kernels: leave them at their defaults")
        return ToyEngine(setup)


class ToyEngine:
    def __init__(self, setup: EngineSetup) -> None:
        self.setup = setup
        self.target, self.drafter, self.k = load(setup.target), None, 0
        if setup.drafter is not None:
            self.drafter, self.k = load(setup.drafter.model), setup.drafter.num_steps
            if self.drafter.config.vocab_size != self.target.config.vocab_size:
                raise Refused(f"drafter.model={setup.drafter.model}: its vocabulary is not that of the target")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(engine="toy", version="1", drafters=frozenset({"STANDALONE"}), features=FEATURES)

    def run(
        self,
        requests: Sequence[Request],
        *,
        actions: Sequence[Action] = (),
        on_step: OnStep | None = None,  # noqa: ARG002 - there are no steps to be seen
        max_steps: int = 10_000,  # noqa: ARG002 - nor to be counted
    ) -> Run:
        for action in actions:
            raise Refused(f"{action.name}: nothing is done to this engine between its steps")
        for request in requests:
            self.refuse(request)
        completions = tuple(self.answer(request) for request in requests)
        return Run(setup=self.setup, capabilities=self.capabilities, requests=tuple(requests), completions=completions)

    def refuse(self, request: Request) -> None:
        """Whatever is not at its default, and that the engine would otherwise pass over."""
        for asked in (request, request.sampling):
            for field in fields(asked):
                if field.name not in FEATURES | ALWAYS and getattr(asked, field.name) != field.default:
                    raise Refused(f"{field.name}={getattr(asked, field.name)!r}: not served by this engine")
        length = len(request.prompt_token_ids) + request.sampling.max_new_tokens
        if length > self.setup.context_length:
            raise Refused(f"context_length={self.setup.context_length}: prompt and max_new_tokens are {length} tokens")
        if not all(0 <= token < self.target.config.vocab_size for token in request.prompt_token_ids):
            raise Refused(f"prompt_token_ids: must lie in 0..{self.target.config.vocab_size - 1}")

    def answer(self, request: Request) -> Completion:
        prompt, cap = request.prompt_token_ids, request.sampling.max_new_tokens
        ends = {self.target.config.eos_token_id, *request.sampling.stop_token_ids}
        output = best(self.target, prompt, 1)
        accept_lens = []
        while len(output) < cap and output[-1] not in ends:
            drafts: list[int] = []
            for _ in range(self.k):
                drafts += best(self.drafter, (*prompt, *output, *drafts), 1)
            wanted = best(self.target, (*prompt, *output, *drafts), len(drafts) + 1)
            correct = next((i for i, draft in enumerate(drafts) if draft != wanted[i]), len(drafts))
            accept_lens.append(correct + 1)
            block = wanted[: correct + 1][: cap - len(output)]
            end = next((i + 1 for i, token in enumerate(block) if token in ends), len(block))
            output += block[:end]
        return Completion(
            request_id=request.request_id,
            prompt_token_ids=prompt,
            token_ids=tuple(output),
            finish_reason="stop" if output[-1] in ends else "length",
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(output)),
            accept_lens=tuple(accept_lens) if self.k else None,
        )

    def close(self) -> None:
        del self.target, self.drafter


def load(folder: Path | None) -> Any:
    """Raises `Refused` for a checkpoint that does not fit: a weight at its initial value would be noise."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError) as error:
        raise Refused(f"{folder}: not loaded: {error}") from error
    if any(info.values()):
        raise Refused(f"{folder}: its tensors do not fit its config: {info}")
    return model


@torch.inference_mode()
def best(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    """The most probable successors of the last `count` tokens."""
    return list(model(torch.tensor([tokens])).logits[0, -count:].argmax(-1).tolist())
