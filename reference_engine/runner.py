"""One launch: target forward, verification, commit, draft. Reads and writes the `RequestPool`, never host results."""

from __future__ import annotations

import torch

from reference_engine.batch import Batch, LaunchTrace, ProposeRecord, StepResult
from reference_engine.cache.kv import KVCache, attention_context, slots_of
from reference_engine.config import EngineConfig
from reference_engine.drafters.base import Drafter, ProposeInputs
from reference_engine.model.causal_lm import CausalLM
from reference_engine.pool import PLACEHOLDER, RequestPool
from reference_engine.request import RequestState
from reference_engine.sampling.logprobs import LogprobTensors, compute_logprobs
from reference_engine.sampling.processors import SamplingBatch
from reference_engine.sampling.random import RandomSource
from reference_engine.sampling.sampler import Window, sample_next, verify


class Runner:
    """Owns the device: models, caches, the request pool."""

    def __init__(
        self,
        config: EngineConfig,
        target: CausalLM,
        drafter: Drafter | None,
        cache: KVCache,
        pool: RequestPool,
        random: RandomSource,
    ) -> None:
        self.config = config
        self.target = target
        self.drafter = drafter
        self.cache = cache
        self.pool = pool
        self.random = random
        self.device = torch.device(config.device)
        self.num_target_forwards = 0
        self._aux_rows: tuple[int, int] | None = None
        self._sampling: tuple[list[RequestState], int, SamplingBatch] | None = None

    def launch(self, batch: Batch) -> StepResult:
        drafted = self.drafter.num_forwards if self.drafter else 0
        result = self._extend(batch) if batch.kind == "extend" else self._decode(batch)
        if result.trace is not None and self.drafter is not None:
            result.trace.draft_forwards = self.drafter.num_forwards - drafted
        return result

    def _rows(self, batch: Batch) -> torch.Tensor:
        """Pool rows of the batch, padded to its bucket."""
        rows = [request.row for request in batch.requests]
        rows += [self.pool.pad_row] * (self.config.padded_batch(len(rows)) - len(rows))
        return torch.tensor(rows, device=self.device)

    def _sampling_batch(self, batch: Batch, size: int) -> SamplingBatch:
        """Columns of sampling parameters; those of the last launch serve again while the batch stays the same."""
        cached = self._sampling
        if cached is None or cached[0] != batch.requests or cached[1] != size:
            config = self.target.config
            columns = SamplingBatch.of(batch.requests, size, config.vocab_size, config.eos_token_ids, self.device)
            self._sampling = cached = (list(batch.requests), size, columns)
        return cached[2]

    def _forward(
        self, token_ids: torch.Tensor, cache_positions: torch.Tensor, max_kv_len: int, **window: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Target pass over token_ids [N, Q] -> hidden [N, Q, H], auxiliary states, write slots [N * Q]."""
        context = attention_context(
            window.pop("block_table"),  # type: ignore[arg-type]  # always a tensor
            self.config.page_size,
            cache_positions,
            max_kv_len,
            **window,
        )
        self.num_target_forwards += 1
        aux_layer_ids = self.drafter.aux_layer_ids if self.drafter else ()
        hidden, aux = self.target.forward(token_ids, context, self.cache, aux_layer_ids)
        if aux_layer_ids:
            # Counted where they are collected: what comes after may stretch or cut them.
            self._aux_rows = (0 if aux is None else aux.shape[0] * aux.shape[1], token_ids.numel())
        return hidden, aux, context.write_slots

    def _extend(self, batch: Batch) -> StepResult:
        pool, size = self.pool, len(batch.requests)
        rows = self._rows(batch)
        pad = [0] * (len(rows) - size)
        starts = torch.tensor(batch.starts + pad, device=self.device)
        lens = torch.tensor(batch.chunk_lens + pad, device=self.device)
        columns = torch.arange(max(batch.chunk_lens), device=self.device)
        valid = columns < lens[:, None]
        positions = torch.where(valid, starts[:, None] + columns, 0)
        token_ids = torch.where(valid, pool.token_ids[rows].gather(1, positions), 0)
        max_kv_len = max(start + length for start, length in zip(batch.starts, batch.chunk_lens, strict=True))
        hidden, aux, _ = self._forward(
            token_ids, positions, max_kv_len, block_table=pool.block_table[rows], valid=valid
        )
        sampling = self._sampling_batch(batch, len(rows))
        samples = torch.tensor(batch.samples + [False] * len(pad), device=self.device)
        last = (lens - 1).clamp(min=0)
        logits = self.target.logits(hidden[torch.arange(len(rows)), last])[:, None]
        window = Window(pool, rows, sampling, self.random)
        sampled = torch.where(samples[:, None], sample_next(logits, window), PLACEHOLDER)
        counts = samples.long()
        following = positions[:, :1] + lens[:, None]
        backup = pool.token_ids[rows].gather(1, following.clamp(max=pool.token_ids.shape[1] - 1))[:, 0]
        pool.commit(rows[:size], sampled[:size], counts[:size])
        result = StepResult(batch, sampled, counts, hidden.flatten(0, 1), hidden.shape[1])
        result.logprobs = self._logprobs(batch, logits, sampled)
        result.prompt_logprobs = self._prompt_logprobs(batch, hidden, positions, rows)
        ends = torch.tensor(batch.ends_prefill + [False] * len(pad), device=self.device)
        self._propose(
            result, sampling, rows, token_ids, positions, lens, aux if aux is not None else hidden, backup, ~ends
        )
        return result

    def _decode(self, batch: Batch) -> StepResult:
        pool, size = self.pool, len(batch.requests)
        width = self.config.num_draft_tokens
        rows = self._rows(batch)
        roots = pool.seq_lens[rows] - 1
        drafts = pool.draft_tokens[rows]
        root_tokens = pool.token_ids[rows].gather(1, roots[:, None])
        token_ids = torch.cat([root_tokens, drafts.clamp(min=0)], dim=1)
        cache_positions = roots[:, None] + torch.arange(width, device=self.device)
        sampling = self._sampling_batch(batch, len(rows))
        window = Window(pool, rows, sampling, self.random)
        block_table = pool.block_table[rows]
        max_kv_len = max(request.max_num_tokens for request in batch.requests) - 1 + width
        if self._is_tree:
            window.parents = pool.draft_parents[rows]
            hidden, aux, slots = self._forward(
                token_ids,
                cache_positions,
                max_kv_len,
                block_table=block_table,
                positions=roots[:, None] + window.depths,
                window_start=roots,
                window_mask=window.ancestors,
            )
        else:
            hidden, aux, slots = self._forward(token_ids, cache_positions, max_kv_len, block_table=block_table)
        logits = self.target.logits(hidden)
        verdict = verify(logits, drafts, window, self.config.max_accept_len)
        pool.commit(rows[:size], verdict.emitted[:size], verdict.accept_lens[:size])
        result = StepResult(batch, verdict.emitted, verdict.accept_lens, hidden.flatten(0, 1), width)
        result.accept_index, result.draft_tokens = verdict.accept_index, drafts
        path = verdict.accept_index.clamp(min=0)
        if self._is_tree:
            self._compact(slots.view(len(rows), width), verdict.accept_index, block_table, roots)
            token_ids, logits = token_ids.gather(1, path), _take_rows(logits, path)
        result.logprobs = self._logprobs(batch, logits, verdict.emitted)
        if self.drafter is not None:
            features = aux if aux is not None else hidden
            features = _take_rows(features, path) if self._is_tree else features
            positions = roots[:, None] + torch.arange(path.shape[1], device=self.device)
            following = torch.zeros_like(roots)
            never = torch.zeros_like(roots, dtype=torch.bool)
            self._propose(result, sampling, rows, token_ids, positions, verdict.accept_lens, features, following, never)
        elif self.config.trace:
            result.trace = LaunchTrace(_id_range(token_ids), target_forwards=1)
        return result

    @property
    def _is_tree(self) -> bool:
        return self.config.spec is not None and self.config.spec.topk > 1

    def _compact(
        self, slots: torch.Tensor, accept_index: torch.Tensor, block_table: torch.Tensor, roots: torch.Tensor
    ) -> None:
        """Move the accepted path's KV to the front of each verify window."""
        kept = accept_index >= 0
        source = slots.gather(1, accept_index.clamp(min=0))
        front = roots[:, None] + torch.arange(accept_index.shape[1], device=self.device)
        target = slots_of(block_table, front, self.config.page_size)
        self.cache.move(source[kept], target[kept])

    def _propose(
        self,
        result: StepResult,
        sampling: SamplingBatch,
        rows: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        num_rows: torch.Tensor,
        hidden: torch.Tensor,
        backup: torch.Tensor,
        discard: torch.Tensor,
    ) -> None:
        """Call the drafter and store its drafts for the next verify step."""
        batch, pool, drafter = result.batch, self.pool, self.drafter
        if self.config.trace:
            result.trace = LaunchTrace(_id_range(token_ids), target_forwards=1)
        if drafter is None:
            return
        cached = [request.num_cached for request in batch.requests]
        inputs = ProposeInputs(
            rows=rows,
            request_ids=tuple(request.request_id for request in batch.requests),
            token_ids=token_ids,
            positions=positions,
            num_rows=num_rows,
            hidden=hidden,
            sampled_token_ids=result.emitted,
            backup_token_ids=backup,
            discard=discard,
            all_discarded=batch.kind == "extend" and not any(batch.ends_prefill),
            seq_lens=pool.seq_lens[rows],
            computed_from=torch.tensor(cached + [0] * (len(rows) - len(cached)), device=self.device),
            history=pool.token_ids,
            block_table=pool.block_table[rows],
            # What this launch emits is counted as pending already.
            max_seq_len=max(request.max_num_tokens for request in batch.requests),
            sampling=sampling,
        )
        proposal = drafter.propose(inputs)
        drafts = _drop_invalid(proposal.token_ids, self.target.config.vocab_size, chain=not self._is_tree)
        size = len(batch.requests)
        pool.draft_tokens[rows[:size]] = drafts[:size]
        if proposal.parents is not None:
            pool.draft_parents[rows[:size]] = proposal.parents[:size]
        if pool.draft_probs is not None and proposal.probs is not None:
            pool.draft_probs[rows[:size]] = proposal.probs[:size].to(pool.draft_probs.dtype)
        if result.trace is not None:
            result.trace.propose = ProposeRecord(
                request_ids=tuple(request.owner for request in batch.requests),
                k=drafts.shape[1],
                sampled_width=result.emitted.shape[1],
                discarded=tuple(discard[:size].tolist()),
                returned=proposal.token_ids,
                sampled=result.emitted,
                token_ids=drafts[:size].clone(),
            )
            result.trace.aux_rows = self._aux_rows

    def _logprobs(self, batch: Batch, logits: torch.Tensor, emitted: torch.Tensor) -> LogprobTensors | None:
        wanted = [r.sampling.logprobs for r in batch.requests if r.sampling.logprobs is not None]
        return compute_logprobs(logits, emitted, max(wanted)) if wanted else None

    def _prompt_logprobs(
        self, batch: Batch, hidden: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> LogprobTensors | None:
        wanted = [r.sampling.prompt_logprobs for r in batch.requests if r.sampling.prompt_logprobs is not None]
        if not wanted:
            return None
        following = self.pool.token_ids[rows].gather(1, positions + 1)
        return compute_logprobs(self.target.logits(hidden), following, max(wanted))


def _take_rows(x: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """[N, Q, W] gathered along Q by [N, w]."""
    return x.gather(1, path[:, :, None].expand(-1, -1, x.shape[2]))


def _drop_invalid(token_ids: torch.Tensor, vocab_size: int, *, chain: bool) -> torch.Tensor:
    """Ids outside the vocabulary become PLACEHOLDER; in a chain so does all that follows them."""
    valid = (token_ids >= 0) & (token_ids < vocab_size)
    if chain:
        valid = valid.long().cumprod(dim=1).bool()
    return torch.where(valid, token_ids, PLACEHOLDER)


def _id_range(token_ids: torch.Tensor) -> tuple[int, int]:
    return int(token_ids.min()), int(token_ids.max())
