"""transformers as an engine, in this process: plain `generate` (an independent baseline) and assisted generation.

Black box. Requests run one after another, each alone. What comes back is what transformers gave, unmended: tokens,
raw logits and hidden states are its own output. Semantics worth knowing, read off transformers 5.24 and tested:

- Logits are rounded to float32 before any processor and before the argmax, also in float64. Logprobs of a float64
  run come from the unrounded logits of the same forwards.
- Assisted generation drafts before the prefill, so the first entry of `accept_lens` belongs to the forward that
  carried the prompt, and the accept lengths sum to the completion. It drafts fewer tokens near `max_new_tokens`.
- Stop strings are matched in the prompt's tail too; the tokens that spell one are delivered, the text ends before it.
- Each draft is sampled when the request is sampled; there is no greedy drafting for sampled requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList, StopStringCriteria

from harness.contract import (
    Action,
    Capabilities,
    Completion,
    Engine,
    EngineSetup,
    FinishReason,
    HiddenStates,
    LogprobRow,
    OnStep,
    Refused,
    Request,
    Run,
    SamplingParams,
    StateSnapshot,
    Usage,
)
from harness.engines.logprobs import logprob_row
from harness.engines.transformers_load import Checkpoint, load_checkpoint, new_generation_config
from harness.engines.transformers_requests import (
    capabilities,
    generation_config,
    refuse_request,
    refuse_setup,
    stop_ids,
)
from harness.engines.transformers_watch import GenerationWatch


class TransformersFactory:
    """Starts transformers on a checkpoint directory; nothing is downloaded."""

    name = "transformers"

    def start(self, setup: EngineSetup) -> Engine:
        """Raises `Refused` for what transformers cannot do and for a checkpoint that does not fit.

        Sizes of pages, chunks and batches mean nothing to it: it keeps one contiguous cache per request.
        """
        refuse_setup(setup)
        target = load_checkpoint(setup.target, setup.dtype, setup.device, "target")
        draft = None
        if setup.drafter is not None and setup.drafter.model is not None:
            draft = load_checkpoint(setup.drafter.model, setup.dtype, setup.device, "drafter.model")
            if draft.vocab_size != target.vocab_size:
                raise Refused(
                    f"drafter.model={setup.drafter.model}: its vocabulary of {draft.vocab_size} differs from the "
                    f"target's {target.vocab_size}; name a drafter with the target's tokenizer"
                )
            draft.model.generation_config = new_generation_config(
                num_assistant_tokens=setup.drafter.num_steps,
                num_assistant_tokens_schedule="constant",
                assistant_confidence_threshold=0.0,
            )
        return TransformersEngine(setup, target, draft)


class TransformersEngine:
    """A target, and perhaps a drafter, in memory. Keeps nothing between requests but the stream of unseeded seeds."""

    def __init__(self, setup: EngineSetup, target: Checkpoint, draft: Checkpoint | None) -> None:
        self.setup = setup
        self._target = target
        self._draft = draft
        self._seeds = torch.Generator().manual_seed(setup.seed)

    @property
    def capabilities(self) -> Capabilities:
        return capabilities(self.setup)

    def run(
        self,
        requests: Sequence[Request],
        *,
        actions: Sequence[Action] = (),
        on_step: OnStep | None = None,
        max_steps: int = 10_000,
    ) -> Run:
        """Each request alone, in the given order. There are no steps to see, so `on_step` is never called, and
        `max_steps` is not needed: every request ends within `max_new_tokens` forwards."""
        del on_step, max_steps
        for action in actions:
            raise Refused(f"{action.name}: nothing can be done to transformers while it generates")
        for request in requests:
            refuse_request(request, self.setup, self._target)
        completions = tuple(
            self._complete(request, index) for request in requests for index in range(request.sampling.n)
        )
        return Run(setup=self.setup, capabilities=self.capabilities, requests=tuple(requests), completions=completions)

    def fresh_state(self, token_ids: Sequence[int]) -> StateSnapshot:
        raise Refused(f"fresh_state of {len(token_ids)} tokens: transformers is a black box here, it has no snapshots")

    def close(self) -> None:
        """Nothing is held outside this object."""

    def _complete(self, request: Request, index: int) -> Completion:
        sampling = request.sampling
        prompt = torch.tensor([request.prompt_token_ids], device=self.setup.device)
        watch = GenerationWatch(prompt_len=prompt.shape[1])
        output = self._generate(request, self._sample_seed(sampling, index), prompt, watch)
        sequence: list[int] = output.sequences[0].tolist()
        token_ids = tuple(sequence[prompt.shape[1] :])
        speculative = self._draft is not None
        return Completion(
            request_id=request.request_id,
            index=index,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=token_ids,
            finish_reason=self._finish_reason(sampling, sequence, output.sequences),
            usage=Usage(prompt_tokens=prompt.shape[1], completion_tokens=len(token_ids)),
            text=self._text(sampling, token_ids),
            logprobs=self._logprobs(sampling.logprobs, token_ids, output, watch, sequence),
            prompt_logprobs=self._prompt_logprobs(sampling.prompt_logprobs, prompt),
            hidden_states=_hidden_states(output.hidden_states) if request.return_hidden_states else None,
            accept_lens=watch.accept_lens(sequence, greedy=sampling.greedy) if speculative else None,
            draft_lens=watch.draft_lens() if speculative else None,
        )

    def _generate(self, request: Request, seed: int, prompt: torch.Tensor, watch: GenerationWatch) -> Any:
        target = self._target.model
        draft = None if self._draft is None else self._draft.model
        devices = [prompt.device] if prompt.device.type == "cuda" else []
        # transformers draws from torch's global generator: seed it inside a fork, so that ours is left alone.
        with torch.random.fork_rng(devices=devices), watch.attached(target):
            torch.manual_seed(seed)
            return target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                generation_config=generation_config(request, stop_ids(request.sampling, self._target)),
                logits_processor=LogitsProcessorList([watch]),
                assistant_model=draft,
                tokenizer=self._target.tokenizer if request.sampling.stop else None,
            )

    def _sample_seed(self, sampling: SamplingParams, index: int) -> int:
        if sampling.seed is not None:
            return sampling.seed + index
        return int(torch.randint(2**62, (1,), generator=self._seeds))

    def _finish_reason(self, sampling: SamplingParams, sequence: list[int], sequences: torch.Tensor) -> FinishReason:
        if sequence[-1] in stop_ids(sampling, self._target):
            return "stop"
        if sampling.stop and bool(StopStringCriteria(self._target.tokenizer, list(sampling.stop))(sequences, None)[0]):
            return "stop"
        return "length"

    def _text(self, sampling: SamplingParams, token_ids: tuple[int, ...]) -> str | None:
        """Decoded without special tokens; what stopped the request is not part of it."""
        if token_ids[-1] in stop_ids(sampling, self._target):
            token_ids = token_ids[:-1]
        text = self._target.decode(token_ids)
        if text is None:
            return None
        found = [position for stop in sampling.stop if (position := text.find(stop)) >= 0]
        return text[: min(found)] if found else text

    def _logprobs(
        self, num_top: int | None, token_ids: tuple[int, ...], output: Any, watch: GenerationWatch, sequence: list[int]
    ) -> tuple[LogprobRow, ...] | None:
        if num_top is None:
            return None
        rows = watch.raw_logits(sequence) if self.setup.dtype == "float64" else [row[0] for row in output.logits]
        # Not strict: a count that differs from the tokens' is the engine's fault, and COUNT-1's to find.
        return tuple(logprob_row(row, token_id, num_top) for row, token_id in zip(rows, token_ids, strict=False))

    def _prompt_logprobs(self, num_top: int | None, prompt: torch.Tensor) -> tuple[LogprobRow | None, ...] | None:
        if num_top is None:
            return None
        with torch.no_grad():
            logits = self._target.model(prompt).logits[0]
        later = prompt[0, 1:].tolist()
        return (None, *(logprob_row(row, token_id, num_top) for row, token_id in zip(logits, later, strict=False)))


def _hidden_states(per_token: Sequence[Sequence[torch.Tensor]]) -> HiddenStates:
    """`per_token[i][-1]` is the final-norm output [1, rows, width] of the forward that yielded token i: the whole
    prompt for token 0, one row afterwards."""
    prefill, *decode = (layers[-1][0] for layers in per_token)
    return HiddenStates(prefill=prefill, decode=tuple(rows[-1] for rows in decode))
