"""Results become output: tokens are committed one by one, the block is cut where the request finishes, and whatever
belongs to a token (hidden row, logprob) is cut with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer

from reference_engine.batch import StepResult
from reference_engine.request import FinishReason, Logprob, RequestOutput, RequestState, Status


@dataclass(slots=True)
class SpecStats:
    """Counters over verify steps of unfinished requests. `accepted_per_position[i]`: steps that accepted draft i."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def count(self, draft_len: int, accept_len: int) -> None:
        if draft_len == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += draft_len
        self.num_accepted_tokens += accept_len - 1
        for position in range(accept_len - 1):
            self.accepted_per_position[position] += 1


class Detokenizer:
    """Text of output tokens; without a tokenizer.json there is no text and stop strings are refused."""

    def __init__(self, model: Path) -> None:
        file = model / "tokenizer.json"
        try:
            self.tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else None
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"{file}: is no tokenizer ({error}); it is damaged, copy it again") from error

    def text(self, token_ids: list[int]) -> str | None:
        return None if self.tokenizer is None else self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def stop_position(self, token_ids: list[int], stop: tuple[str, ...]) -> int:
        """Where in the text the earliest stop string that the last token completed starts; -1 without any."""
        # A match reaches back at most the longest stop string; special tokens and parts of a character add no text.
        longest = max(map(len, stop))
        width = longest + 8
        while width < len(token_ids) and len(self.text(token_ids[-width:-1]) or "") < longest:
            width *= 2
        before, after = self.text(token_ids[-width:-1]) or "", self.text(token_ids[-width:]) or ""
        # A character whose last byte has just come was a replacement character before.
        old = len(before.rstrip("\ufffd"))
        starts = [after.find(s, max(old - len(s) + 1, 0)) for s in stop]
        found = [start for start in starts if start >= 0]
        return len(self.text(token_ids) or "") - len(after) + min(found) if found else -1


class OutputProcessor:
    """Turns a `StepResult` into `RequestOutput`s and advances the requests on the host."""

    def __init__(
        self,
        eos_token_ids: tuple[int, ...],
        detokenizer: Detokenizer,
        num_steps: int,
        layer_states: Callable[[RequestState], torch.Tensor | None] = lambda _request: None,
    ) -> None:
        """`layer_states` gives a finished request's, while it still has its pages."""
        self.eos_token_ids = frozenset(eos_token_ids)
        self.detokenizer = detokenizer
        self.layer_states = layer_states
        self.speculative = num_steps > 0
        self.stats = SpecStats(accepted_per_position=[0] * num_steps)

    @torch.inference_mode(False)  # what is delivered are ordinary tensors, the user's to write to
    def process(self, result: StepResult) -> list[RequestOutput]:
        batch = result.batch
        emitted, counts = result.emitted.tolist(), result.counts.tolist()
        stuck = None if result.stuck is None else result.stuck.tolist()
        paths = None if result.accept_index is None else result.accept_index.tolist()
        draft_lens = None
        if result.draft_tokens is not None and self.speculative:
            draft_lens = [sum(token >= 0 for token in drafts) for drafts in result.draft_tokens.tolist()]
        outputs = []
        for index, request in enumerate(batch.requests):
            request.pending -= 1
            if batch.emits(index):
                request.pending_emits -= 1
                request.pending_tokens -= result.emitted.shape[1]
            if request.finished:
                continue
            if batch.kind == "extend":
                self._collect_prompt(result, index, request)
                if not batch.samples[index]:
                    continue
            elif draft_lens is not None:
                request.accept_lens.append(counts[index])
                request.draft_lens.append(draft_lens[index])
                self.stats.count(draft_lens[index], counts[index])
            first = not request.output_token_ids
            dry = stuck is not None and stuck[index]
            tokens = self._commit(request, emitted[index][: counts[index] - dry])
            if dry and not request.finished:
                self.finish(request, "abort")
            path = None if paths is None else paths[index]
            outputs.append(self._output(result, index, request, tokens, path, first))
        return outputs

    def _commit(self, request: RequestState, tokens: list[int]) -> list[int]:
        """Append tokens until one finishes the request; returns those that were kept."""
        for kept, token in enumerate(tokens, start=1):
            request.output_token_ids.append(token)
            followed = request.matcher is None or request.matcher.accept(token)
            assert followed, f"{request.owner} was given token {token}, which its grammar forbids"
            reason = self._finish_reason(request, token)
            if reason is not None:
                self.finish(request, reason)
                return tokens[:kept]
        return tokens

    def _finish_reason(self, request: RequestState, token: int) -> FinishReason | None:
        """A stop wins over the length cap when one token reaches both. What stops a request is not part of its text."""
        params, output = request.sampling, request.output_token_ids
        count = len(output)
        # The sampler masks stop ids before min_new_tokens; a stop string may come up and does not count then.
        if params.stop and count > params.min_new_tokens:
            position = self.detokenizer.stop_position(output, params.stop)
            if position >= 0:
                request.text = (self.detokenizer.text(output) or "")[:position]
                return "stop"
        if token in params.stop_token_ids or (token in self.eos_token_ids and not params.ignore_eos):
            request.text = self.detokenizer.text(output[:-1])
            return "stop"
        return "length" if count >= params.max_new_tokens else None

    def finish(self, request: RequestState, reason: FinishReason) -> None:
        request.status = Status.FINISHED
        request.finish_reason = reason
        if request.text is None:
            request.text = self.detokenizer.text(request.output_token_ids)

    def _collect_prompt(self, result: StepResult, index: int, request: RequestState) -> None:
        """Keep the prompt's hidden rows and logprobs of this chunk; a resumed request delivered them long ago."""
        if request.prompt_delivered:
            return
        start, length = result.batch.starts[index], result.batch.chunk_lens[index]
        first = index * result.stride
        if request.return_hidden_states:
            request.prefill_hidden.append(result.hidden[first : first + length].clone())
        if request.pooled is not None:
            request.pooled.add_prompt(result.hidden[first : first + length])
        num_top = request.sampling.prompt_logprobs
        if num_top is not None and result.prompt_logprobs is not None:
            if start == 0:
                request.prompt_logprobs.append(None)
            following = min(length, len(request.prompt_token_ids) - 1 - start)
            request.prompt_logprobs += result.prompt_logprobs.rows(index, following, num_top)

    def _output(
        self,
        result: StepResult,
        index: int,
        request: RequestState,
        tokens: list[int],
        path: list[int] | None,
        first: bool,
    ) -> RequestOutput:
        if request.pooled is not None and path is not None:
            window = index * result.stride
            request.pooled.add_output(result.hidden[[window + node for node in path[: len(tokens)]]])
        prefill_hidden = None
        decode_hidden: tuple[torch.Tensor, ...] = ()
        if request.return_hidden_states and path is None and tokens:
            prefill_hidden = torch.cat(request.prefill_hidden)
            request.prefill_hidden.clear()
        elif request.return_hidden_states and path is not None:
            window = index * result.stride
            decode_hidden = tuple(result.hidden[window + node].clone() for node in path[: len(tokens)])
        logprobs: list[Logprob] = []
        if request.sampling.logprobs is not None and result.logprobs is not None:
            logprobs = result.logprobs.rows(index, len(tokens), request.sampling.logprobs)
        request.prompt_delivered |= first
        return self.describe(
            request, token_ids=tuple(tokens), logprobs=tuple(logprobs), prefill=prefill_hidden, decode=decode_hidden
        )

    def describe(
        self,
        request: RequestState,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[Logprob, ...] = (),
        prefill: torch.Tensor | None = None,
        decode: tuple[torch.Tensor, ...] = (),
    ) -> RequestOutput:
        # A request that was aborted while it prefilled has some of them only: better none than a wrong number.
        pooled = None
        if request.finished and request.pooled is not None:
            pooled = request.pooled.mean(len(request.prompt_token_ids))
        complete = request.finished and len(request.prompt_logprobs) == len(request.prompt_token_ids)
        return RequestOutput(
            request_id=request.request_id,
            index=request.index,
            token_ids=token_ids,
            logprobs=logprobs,
            prefill_hidden=prefill,
            decode_hidden=decode,
            pooled_hidden=pooled,
            prompt_logprobs=tuple(request.prompt_logprobs) if complete else None,
            finish_reason=request.finish_reason,
            text=request.text,
            num_output_tokens=len(request.output_token_ids),
            num_cached_tokens=request.reported_cached or 0,
            accept_lens=tuple(request.accept_lens) if request.finished else (),
            draft_lens=tuple(request.draft_lens) if request.finished else (),
            layer_states=self.layer_states(request) if request.finished else None,
        )
