"""The engine: request -> batch -> draft -> verify -> commit -> output, one `step` at a time."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from reference_engine.batch import Batch, LaunchTrace, StepResult
from reference_engine.cache.kv import KVCache
from reference_engine.cache.pages import PageAllocator
from reference_engine.cache.recurrent import RecurrentCache
from reference_engine.config import EngineConfig, pages_for, require
from reference_engine.drafters import load_drafter
from reference_engine.grammar import Grammars, Matcher
from reference_engine.lifecycle import LifeCycle
from reference_engine.model.causal_lm import CausalLM
from reference_engine.output import Detokenizer, OutputProcessor
from reference_engine.pool import RequestPool
from reference_engine.request import RequestOutput, RequestState, SamplingParams
from reference_engine.row_mean import POOLED_ROWS, PooledRows, RowMean
from reference_engine.runner import Runner
from reference_engine.sampling.random import CounterRandom, RandomSource
from reference_engine.scheduler import Scheduler


@dataclass(slots=True, kw_only=True)
class StepOutput:
    """`outputs` in the order of commitment, `preempted` by owner: what happened between this step and the one before is
    told here, too. With `trace`: what was launched in this step (kind, launch) and whose results were processed
    (`processed`; one step later under overlap scheduling)."""

    kind: Literal["extend", "decode", "idle"] = "idle"
    outputs: list[RequestOutput] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    launch: LaunchTrace | None = None
    processed: list[ProcessedResult] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class ProcessedResult:
    """A result and, for each of its requests, whether it had finished before (its tokens were dropped)."""

    result: StepResult
    discarded: tuple[bool, ...]


class LLMEngine(LifeCycle):
    """See `EngineConfig`. `random` replaces the source of every random number.

    Raises ValueError that names the field, the value and the mend: at construction for a configuration or checkpoint
    that does not fit, in `add_request` for a request that cannot run, before any other request is touched.
    """

    @torch.no_grad()
    def __init__(self, config: EngineConfig, random: RandomSource | None = None) -> None:
        self.config = config
        self.random = random or CounterRandom()
        device = torch.device(config.device)
        num_positions = config.max_pages_per_request * config.page_size
        self.target = CausalLM(config.model, config.torch_dtype, device, num_positions)
        self.drafter = load_drafter(config, self.target, self.random, num_positions)
        self.target.finish_loading(with_mtp=config.with_mtp)
        self.model_config = self.target.config
        limit = self.target.config.max_positions
        mend = f"must not exceed max_position_embeddings ({limit}) of the target"
        require(config.context_length <= limit, "context_length", config.context_length, mend)
        self.cache = KVCache(config, self.target.config, self.target.config.num_layers)
        self.pool = RequestPool(config, self.target.config.vocab_size, self._new_recurrent_cache())
        lookahead = self.drafter.lookahead if self.drafter else 0
        self.allocator = PageAllocator(
            config.total_pages, config.page_size, lookahead, config.prefix_cache, self._poison
        )
        self.scheduler = Scheduler(config, self.allocator, self.pool)
        self.runner = Runner(config, self.target, self.drafter, self.cache, self.pool, self.random)
        self.set_num_steps(config.spec.num_steps if config.spec else 0)
        self.detokenizer = Detokenizer(config.model)
        self.grammars = Grammars(config.model, self.target.config.vocab_size, self.target.config.eos_token_ids)
        self.processor = OutputProcessor(
            self.target.config.eos_token_ids, self.detokenizer, config.max_accept_len - 1, self._layer_states
        )
        self._in_flight: deque[StepResult] = deque()
        self._launches = itertools.count()
        self._step = StepOutput()
        self._arrivals = itertools.count()
        self._live: dict[str, list[RequestState]] = {}

    def _new_recurrent_cache(self) -> RecurrentCache | None:
        if not self.target.config.recurrent_layers:
            return None
        for name in ("compile", "cuda_graphs"):
            mend = "a target with recurrent layers steps through its states in Python; must be False"
            require(not getattr(self.config, name), name, True, mend)
        return RecurrentCache(self.config, self.target.config)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live) or bool(self._in_flight) or bool(self._step.outputs)

    def requests(self) -> Iterable[RequestState]:
        return itertools.chain.from_iterable(self._live.values())

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        return_hidden_states: bool = False,
        pooled_hidden: PooledRows | None = None,
        committed_token_ids: Sequence[int] = (),
        num_speculative_tokens: int | None = None,
    ) -> None:
        """Queue a request. `committed_token_ids` continue one that already has output (as after a preemption).
        `pooled_hidden` asks for the mean of its hidden rows; `num_speculative_tokens` is the most that is drafted for
        it in a step, 0 = nothing. Sample i of n draws as a request of its own would with `seed` + i."""
        sampling = sampling or SamplingParams()
        which = f"must be None or one of {', '.join(POOLED_ROWS)}"
        require(pooled_hidden in (None, *POOLED_ROWS), "pooled_hidden", pooled_hidden, which)
        whole = "must be None with committed_token_ids: their rows were computed elsewhere"
        require(pooled_hidden is None or not committed_token_ids, "pooled_hidden", pooled_hidden, whole)
        limit = num_speculative_tokens
        require(limit is None or limit >= 0, "num_speculative_tokens", limit, "must be None (no limit) or >= 0")
        matchers = self.check(request_id, prompt_token_ids, sampling, committed_token_ids)
        states = []
        for index, matcher in enumerate(matchers):
            arrival = next(self._arrivals)
            # Unseeded requests draw from streams of their own, told apart by arrival.
            unseeded = (self.config.seed << 32) + (1 << 31) + arrival
            seed = _int64(unseeded if sampling.seed is None else sampling.seed + index)
            state = RequestState(
                request_id, index, tuple(prompt_token_ids), sampling, return_hidden_states, seed, arrival
            )
            state.pooled = None if pooled_hidden is None else RowMean(pooled_hidden)
            state.matcher = matcher
            state.output_token_ids = list(committed_token_ids)
            state.prompt_delivered = bool(committed_token_ids)
            state.num_speculative_tokens = limit
            states.append(state)
        self._live[request_id] = states
        self.scheduler.waiting.extend(states)

    def set_num_steps(self, num_steps: int) -> None:
        """Draft so many steps from the next launch on, 0 = nothing: fewer tokens, or a shallower tree."""
        most = self.config.spec.num_steps if self.config.spec else 0
        mend = f"must lie in 0..{most}, the num_steps that the engine was started with"
        require(0 <= num_steps <= most, "num_steps", num_steps, mend)
        self.num_steps = num_steps
        if not self.asleep:
            self.runner.num_steps = num_steps

    def abort(self, request_id: str) -> None:
        """End a request now; what it has so far is delivered with the next step. Unknown and finished ids are fine."""
        for state in self._live.get(request_id, []):
            if not state.finished:
                self.processor.finish(state, "abort")
                self._step.outputs.append(self.processor.describe(state))
        self._retire(self._live.get(request_id, []))

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Launch the next batch and process results: of this launch, or under overlap scheduling of earlier ones."""
        # What a grammar lets follow depends on the tokens before it, so those must be on the host before the launch.
        if any(result.batch.has_grammar for result in self._in_flight):
            self._drain()
        batch = None if self.paused or self.asleep else self.scheduler.schedule(self._drain)
        if batch is None:
            self._drain()
        else:
            self._launch(batch)
        step, self._step = self._step, StepOutput()
        return step

    def _launch(self, batch: Batch) -> None:
        step = self._step
        step.kind = batch.kind
        step.preempted += batch.preempted
        self._mark_launched(batch)
        result = self.runner.launch(batch)
        step.launch = result.trace
        self._in_flight.append(result)
        late = self._late()
        while len(self._in_flight) > late:
            self._process(self._in_flight.popleft())
        for request, ended in zip(batch.requests, batch.ends_prefill, strict=False):
            if ended and request.row >= 0:
                self.scheduler.share_prefix(request)

    def _mark_launched(self, batch: Batch) -> None:
        if batch.kind == "decode":
            batch.width = self.runner.window_width(batch)
        for index, request in enumerate(batch.requests):
            request.pending += 1
            if batch.emits(index):
                request.pending_emits += 1
                request.pending_tokens += min(batch.width, self.config.max_accept_len)

    def _drain(self) -> None:
        while self._in_flight:
            self._process(self._in_flight.popleft())

    def _late(self) -> int:
        """How many results may stay unprocessed after this launch."""
        config, launch = self.config, next(self._launches)
        if not config.overlap:
            return 0
        return config.overlap_depth if config.lateness is None else min(config.lateness(launch), config.overlap_depth)

    def _process(self, result: StepResult) -> None:
        requests = result.batch.requests
        if self.config.trace or self.config.snapshots:
            discarded = tuple(request.finished for request in requests)
            self._step.processed.append(ProcessedResult(result, discarded))
        self._step.outputs += self.processor.process(result)
        self._retire([request for request in requests if request.finished])

    def _retire(self, requests: Iterable[RequestState]) -> None:
        """Give back what finished requests hold, once no launch of theirs is on its way."""
        for request in requests:
            if request.pending:
                continue
            self.scheduler.finish(request)
            siblings = self._live.get(request.request_id, [])
            if all(sibling.finished and not sibling.pending for sibling in siblings):
                self._live.pop(request.request_id, None)

    def _layer_states(self, request: RequestState) -> torch.Tensor | None:
        """What the drafter keeps of all tokens but the last; None where they were not all computed, or are gone."""
        num_rows = request.num_tokens - 1
        if request.row < 0 or self.drafter is None or request.num_final < num_rows:
            return None
        return self.drafter.layer_states(request.pages, num_rows)

    def _poison(self, pages: Iterable[int]) -> None:
        if self.config.poison:
            self.cache.poison(pages)
            if self.pool.recurrent is not None:
                self.pool.recurrent.poison(pages)
            if self.drafter is not None:
                self.drafter.poison(pages)

    def check(
        self, request_id: str, prompt: Sequence[int], sampling: SamplingParams, committed: Sequence[int] = ()
    ) -> list[Matcher] | list[None]:
        """Raise ValueError when the request could not run; nothing is changed. Returns a matcher for each sample,
        behind the committed tokens; None where there is no grammar."""
        config, vocab = self.config, self.model_config.vocab_size
        require(request_id not in self._live, "request_id", request_id, "is already running; ids must be unique")
        require(len(prompt) > 0, "prompt_token_ids", list(prompt), "must not be empty")
        for name, ids in (
            ("prompt_token_ids", prompt),
            ("committed_token_ids", committed),
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", [token for token, _ in sampling.logit_bias]),
            ("bad_words", [token for word in sampling.bad_words for token in word]),
            ("allowed_token_ids", sampling.allowed_token_ids),
        ):
            bad = [token for token in ids if not 0 <= token < vocab]
            require(not bad, name, bad[:5], f"ids must lie in 0..{vocab - 1}, the target's vocabulary")
        mend = f"must be fewer than max_new_tokens={sampling.max_new_tokens}, or nothing is left to generate"
        require(len(committed) < sampling.max_new_tokens, "len(committed_token_ids)", len(committed), mend)
        total = len(prompt) + sampling.max_new_tokens
        mend = f"with max_new_tokens={sampling.max_new_tokens} must not exceed context_length={config.context_length}"
        require(total <= config.context_length, "len(prompt_token_ids)", len(prompt), mend)
        pages = pages_for(total + config.slack_tokens, config.page_size)
        mend = f"must be at least {pages} for this request ({total} tokens and {config.slack_tokens} of slack)"
        require(pages <= config.total_pages, "num_pages", config.total_pages, mend)
        if sampling.stop:
            mend = f"stop strings need a tokenizer.json beside {config.model}"
            require(self.detokenizer.tokenizer is not None, "stop", sampling.stop, mend)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(sampling, name)
            require(value is None or value <= vocab, name, value, f"must not exceed the vocabulary ({vocab})")
        return self._matchers(sampling, committed) if sampling.constrained else [None] * sampling.n

    def _matchers(self, sampling: SamplingParams, committed: Sequence[int]) -> list[Matcher]:
        matchers = self.grammars.matchers(sampling.json_schema, sampling.regex, sampling.n)
        for matcher in matchers:
            for token in committed:
                require(matcher.accept(token), "committed_token_ids", list(committed), "the grammar forbids them")
            require(not matcher.ended, "committed_token_ids", list(committed), "the grammar has ended with them")
        return matchers


def _int64(seed: int) -> int:
    """Any integer as an int64 of the same 64 low bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
