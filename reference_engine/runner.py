"""One launch: target forward, verification, commit, draft. Reads and writes the `RequestPool`, never host results."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reference_engine.batch import Batch, LaunchTrace, ProposeRecord, StepResult
from reference_engine.cache.kv import KVCache, attention_context, slots_of
from reference_engine.cache.recurrent import RecurrentPass
from reference_engine.config import EngineConfig, pages_for
from reference_engine.decode_pass import (
    DecodePass,
    GraphedPass,
    TargetPass,
    compiled,
    page_bucket,
    record_cuda_graph,
)
from reference_engine.draft_plan import plan_drafts
from reference_engine.drafters.base import Drafter, ProposeInputs
from reference_engine.grammar import draft_masks, next_token_mask
from reference_engine.model.causal_lm import CausalLM
from reference_engine.pool import PLACEHOLDER, RequestPool
from reference_engine.request import RequestState
from reference_engine.sampling.logprobs import LogprobTensors, compute_logprobs
from reference_engine.sampling.processors import SamplingBatch
from reference_engine.sampling.random import RandomSource
from reference_engine.sampling.sampler import Window, sample_next, verify
from reference_engine.verification.tree import tree_of


@dataclass(slots=True)
class _Columns:
    """What a batch is on the device: pool rows [N], padded to its bucket, and sampling parameters."""

    requests: list[RequestState]
    host_rows: list[int]
    rows: torch.Tensor
    sampling: SamplingBatch
    zeros: torch.Tensor


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
        self.backend = config.backend
        self.num_target_forwards = 0
        self.num_steps = 0
        self._max_tokens = config.context_length
        if drafter is not None and drafter.max_positions is not None:
            self._max_tokens = min(self._max_tokens, drafter.max_positions)
        self._aux_rows: tuple[int, int] | None = None
        self._columns: _Columns | None = None
        self._aux_layer_ids = drafter.aux_layer_ids if drafter else ()
        self._decode_pass: DecodePass = self._target_over_windows
        if config.compile:
            self._decode_pass = compiled(self._target_over_windows)
        elif config.cuda_graphs:
            self._decode_pass = GraphedPass(self._target_over_windows, record_cuda_graph)

    def close(self) -> None:
        """Let go of the decode pass, whatever was compiled or recorded for it: it refers back to this runner."""
        del self._decode_pass

    def window_width(self, batch: Batch) -> int:
        """Tokens in each verify window of a decode batch: the last committed one and all that may have been drafted.
        What is compiled or recorded keeps to one shape."""
        if self.config.compile or self.config.cuda_graphs:
            return self.config.num_draft_tokens
        return 1 + max(request.num_drafts for request in batch.requests)

    def launch(self, batch: Batch) -> StepResult:
        drafted = self.drafter.num_forwards if self.drafter else 0
        result = self._extend(batch) if batch.kind == "extend" else self._decode(batch)
        if result.trace is not None and self.drafter is not None:
            result.trace.draft_forwards = self.drafter.num_forwards - drafted
        return result

    def _batch_columns(self, batch: Batch) -> _Columns:
        """Those of the last launch serve again while the batch stays the same."""
        rows = [request.row for request in batch.requests]
        columns = self._columns
        if columns is None or columns.requests != batch.requests or columns.host_rows != rows:
            config, size = self.target.config, self.config.padded_batch(len(rows))
            sampling = SamplingBatch.of(
                batch.requests, size, config.vocab_size, config.eos_token_ids, self.device, self.backend
            )
            padded = torch.tensor(rows + [self.pool.pad_row] * (size - len(rows)), device=self.device)
            self._columns = columns = _Columns(list(batch.requests), rows, padded, sampling, torch.zeros_like(padded))
        return columns

    def _count_forward(self, token_ids: torch.Tensor, aux: torch.Tensor | None) -> None:
        self.num_target_forwards += 1
        if self._aux_layer_ids:
            # Counted where they are collected: what comes after may stretch or cut them.
            self._aux_rows = (0 if aux is None else aux.shape[0] * aux.shape[1], token_ids.numel())

    def _extend(self, batch: Batch) -> StepResult:
        pool, size = self.pool, len(batch.requests)
        columns = self._batch_columns(batch)
        rows, sampling = columns.rows, columns.sampling
        pad = [0] * (len(rows) - size)
        starts = torch.tensor(batch.starts + pad, device=self.device)
        lens = torch.tensor(batch.chunk_lens + pad, device=self.device)
        offsets = torch.arange(max(batch.chunk_lens), device=self.device)
        valid = offsets < lens[:, None]
        positions = torch.where(valid, starts[:, None] + offsets, 0)
        token_ids = torch.where(valid, pool.token_ids[rows].gather(1, positions), 0)
        max_kv_len = max(start + length for start, length in zip(batch.starts, batch.chunk_lens, strict=True))
        num_pages = pages_for(max_kv_len, self.config.page_size)
        context = attention_context(self.cache, pool.block_table[rows], positions, num_pages, valid=valid)
        if pool.recurrent is not None:
            new = [request.num_cached == start for request, start in zip(batch.requests, batch.starts, strict=True)]
            is_new = torch.tensor(new + [False] * len(pad), device=self.device)
            context.recurrent = pool.recurrent.prefill(rows, pool.block_table[rows], starts, is_new)
        hidden, aux = self.target.forward(token_ids, context, self.cache, self._aux_layer_ids)
        self._count_forward(token_ids, aux)
        self._settle(context.recurrent, rows[:size], starts[:size], offsets.expand(size, -1), lens[:size])
        samples = torch.tensor(batch.samples + [False] * len(pad), device=self.device)
        last = (lens - 1).clamp(min=0)
        logits = self.target.logits(hidden[torch.arange(len(rows)), last])[:, None]
        window = Window(pool, rows, sampling, self.random)
        if batch.has_grammar:
            matchers = [r.matcher if s else None for r, s in zip(batch.requests, batch.samples, strict=True)]
            window.permitted = next_token_mask(matchers, len(rows), logits.shape[-1]).to(self.device)
        chosen, stuck = sample_next(logits, window)
        sampled = torch.where(samples[:, None], chosen, PLACEHOLDER)
        counts = samples.long()
        following = positions[:, :1] + lens[:, None]
        backup = pool.token_ids[rows].gather(1, following.clamp(max=pool.token_ids.shape[1] - 1))[:, 0]
        pool.commit(rows[:size], sampled[:size], counts[:size])
        result = StepResult(batch, sampled, counts, hidden.flatten(0, 1), hidden.shape[1], stuck=stuck)
        result.logprobs = self._logprobs(batch, logits, sampled)
        result.prompt_logprobs = self._prompt_logprobs(batch, hidden, positions, rows)
        ends = torch.tensor(batch.ends_prefill + [False] * len(pad), device=self.device)
        self._propose(
            result, sampling, rows, token_ids, positions, lens, aux if aux is not None else hidden, backup, ~ends
        )
        return result

    def _decode(self, batch: Batch) -> StepResult:
        pool, size = self.pool, len(batch.requests)
        width = batch.width
        columns = self._batch_columns(batch)
        rows = columns.rows
        window = Window(pool, rows, columns.sampling, self.random)
        window.num_drafts = width - 1
        if batch.has_grammar:
            window.permitted = self._mask_drafts(batch, rows)
        is_tree = self._is_tree and width > 1
        if is_tree:
            parents = pool.draft_parents[rows, : width - 1]
            window.tree = tree_of(window.drafts, parents, pool.seq_lens[rows] - 1, self.backend)
        num_pages = pages_for(max(r.max_num_tokens for r in batch.requests) - 1 + width, self.config.page_size)
        if self.config.compile or self.config.cuda_graphs:
            num_pages = page_bucket(num_pages, self.config.max_pages_per_request)
        target = self._decode_pass(window, num_pages)
        self._count_forward(target.token_ids, target.aux)
        longest = min(width, self.config.max_accept_len)
        verdict = verify(target.logits, target.draft_tokens, window, longest)
        accepted = verdict.accept_index[:size], verdict.accept_lens[:size]
        self._settle(target.recurrent, rows[:size], target.cache_positions[:size, 0], *accepted)
        pool.commit(rows[:size], verdict.emitted[:size], verdict.accept_lens[:size])
        result = StepResult(batch, verdict.emitted, verdict.accept_lens, target.hidden.flatten(0, 1), width)
        result.accept_index, result.draft_tokens = verdict.accept_index, target.draft_tokens
        result.stuck = verdict.stuck
        if is_tree:
            result.draft_parents = parents
            slots = slots_of(pool.block_table[rows], target.cache_positions, self.config.page_size)
            self.cache.compact(slots, verdict.accept_index, verdict.accept_lens)
            target = target.along(verdict.accept_index.clamp(min=0))
        result.logprobs = self._logprobs(batch, target.logits, verdict.emitted)
        if self.drafter is not None:
            positions = target.cache_positions
            window_rows = (target.token_ids, positions, verdict.accept_lens, target.features)
            # Every row emits: there is no known token to fall back to, and nothing to discard.
            self._propose(result, columns.sampling, rows, *window_rows, columns.zeros, columns.zeros.bool())
        elif self.config.trace:
            result.trace = LaunchTrace(_id_range(target.token_ids), target_forwards=1)
        return result

    def _target_over_windows(self, window: Window, num_pages: int) -> TargetPass:
        """The target over the last committed token and the drafts of every row. Depends on tensors alone, so that it
        can be compiled."""
        pool, rows = self.pool, window.rows
        roots = pool.seq_lens.index_select(0, rows) - 1
        token_ids, drafts = pool.token_ids[rows, roots][:, None], window.drafts
        if drafts.shape[1] > 0:
            token_ids = torch.cat([token_ids, drafts.clamp(min=0)], dim=1)
        tree: dict[str, torch.Tensor] = {}
        if window.tree is not None:
            tree = {
                "positions": window.tree.positions,
                "window_start": roots,
                "window_mask": window.tree.mask,
            }
        positions = roots[:, None] + torch.arange(token_ids.shape[1], device=rows.device)
        context = attention_context(self.cache, pool.block_table.index_select(0, rows), positions, num_pages, **tree)
        if pool.recurrent is not None:
            parents = None if window.tree is None else window.tree.parents
            context.recurrent = pool.recurrent.verify(rows, parents)
        hidden, aux = self.target.forward(token_ids, context, self.cache, self._aux_layer_ids)
        logits = self.target.logits(hidden)
        return TargetPass(token_ids, drafts, positions, hidden, aux, logits, context.recurrent)

    def _settle(
        self,
        done: RecurrentPass | None,
        rows: torch.Tensor,
        starts: torch.Tensor,
        path: torch.Tensor,
        lens: torch.Tensor,
    ) -> None:
        """The states after the tokens that count become those of their requests."""
        if done is not None and self.pool.recurrent is not None:
            self.pool.recurrent.settle(done, rows, self.pool.block_table[rows], starts, path, lens)

    def _mask_drafts(self, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
        """What grammars let follow each node, bool [N, n, V]; drafts that can never come up leave the pool."""
        pool, size = self.pool, len(batch.requests)
        num_drafts = batch.width - 1
        drafts, parents = pool.draft_tokens[rows, :num_drafts], pool.draft_parents[rows, :num_drafts]
        matchers = [request.matcher for request in batch.requests]
        permitted, kept = draft_masks(matchers, drafts.cpu(), parents.cpu(), self.target.config.vocab_size)
        pool.draft_tokens[rows[:size], :num_drafts] = drafts.masked_fill(~kept.to(self.device), PLACEHOLDER)[:size]
        return permitted.to(self.device)

    @property
    def _is_tree(self) -> bool:
        return self.config.spec is not None and self.config.spec.topk > 1

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
        padding = [0] * (len(rows) - len(batch.requests))
        assert self.config.spec is not None
        plan = plan_drafts(batch, self.config.spec, self.num_steps, self._max_tokens)
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
            num_steps=plan.num_steps,
            num_drafts=plan.num_drafts,
            limits=plan.limits + padding,
            max_tokens=self._max_tokens,
            seq_lens=pool.seq_lens.index_select(0, rows),
            num_cached=[request.num_cached for request in batch.requests] + padding,
            history=pool.token_ids,
            block_table=pool.block_table.index_select(0, rows),
            # What this launch emits is counted as pending already.
            max_seq_len=max(request.max_num_tokens for request in batch.requests),
            sampling=sampling,
            target_cache=self.cache,
        )
        proposal = drafter.propose(inputs)
        drafts = _drop_invalid(proposal.token_ids, self.target.config.vocab_size, chain=not self._is_tree)
        if not self._is_tree and inputs.cuts_chains:
            places = torch.arange(drafts.shape[1], device=self.device)
            drafts = drafts.masked_fill(places >= torch.minimum(inputs.draft_limits, inputs.room)[:, None], PLACEHOLDER)
        size = len(batch.requests)
        width = plan.num_drafts
        if width < pool.draft_tokens.shape[1]:
            pool.draft_tokens[rows[:size]] = PLACEHOLDER
        pool.draft_tokens[rows[:size], :width] = drafts[:size]
        if proposal.parents is not None:
            pool.draft_parents[rows[:size], :width] = proposal.parents[:size]
        if pool.draft_probs is not None and proposal.probs is not None:
            pool.draft_probs[rows[:size], :width] = proposal.probs[:size].to(pool.draft_probs.dtype)
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
        return compute_logprobs(logits, emitted, max(wanted), self.backend) if wanted else None

    def _prompt_logprobs(
        self, batch: Batch, hidden: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> LogprobTensors | None:
        wanted = [r.sampling.prompt_logprobs for r in batch.requests if r.sampling.prompt_logprobs is not None]
        if not wanted:
            return None
        following = self.pool.token_ids[rows].gather(1, positions + 1)
        return compute_logprobs(self.target.logits(hidden), following, max(wanted), self.backend)


def _drop_invalid(token_ids: torch.Tensor, vocab_size: int, *, chain: bool) -> torch.Tensor:
    """Ids outside the vocabulary become PLACEHOLDER; in a chain so does all that follows them."""
    invalid = token_ids != token_ids.clamp(0, vocab_size - 1)
    if chain:
        invalid = invalid.cumsum(dim=1) > 0
    return token_ids.masked_fill(invalid, PLACEHOLDER)


def _id_range(token_ids: torch.Tensor) -> tuple[int, int]:
    return int(token_ids.min()), int(token_ids.max())
