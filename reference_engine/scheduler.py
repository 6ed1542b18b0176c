"""Which requests run next, on which pages. Knows the host side only; results may still be on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from reference_engine.batch import Batch
from reference_engine.cache.pages import PageAllocator
from reference_engine.config import EngineConfig, pages_for
from reference_engine.pool import RequestPool
from reference_engine.request import RequestState, Status


class Scheduler:
    """First come, first served; extend and decode batches alternate while there is work for both.

    A request is admitted when pages for its whole prefill and one step are there. When a decode step runs out of
    pages, the youngest running request is preempted: its pages go back and it prefills again later.
    """

    def __init__(self, config: EngineConfig, allocator: PageAllocator, pool: RequestPool) -> None:
        self.config = config
        self.allocator = allocator
        self.pool = pool
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState] = []
        self._last_kind = "decode"

    def schedule(self, drain: Callable[[], None]) -> Batch | None:
        """The next batch, or None. `drain` processes every launched result; it is called before a preemption, which
        must not take pages from under a launch or lose its tokens."""
        self._admit()
        prefilling = [request for request in self.running if request.prefilling and not request.finished]
        decoding = list(self._decodable())
        if prefilling and (self._last_kind == "decode" or not decoding):
            self._last_kind = "extend"
            return self._extend_batch(prefilling)
        if not decoding:
            return None
        self._last_kind = "decode"
        return self._decode_batch(decoding, drain)

    def _decodable(self) -> Iterator[RequestState]:
        for request in self.running:
            # Every launch in flight adds at least one token: no need for another once the cap is sure to be reached.
            sure = len(request.output_token_ids) + request.pending_emits
            if not request.prefilling and not request.finished and sure < request.sampling.max_new_tokens:
                yield request

    def _admit(self) -> None:
        while self.waiting and self.pool.num_free_rows:
            request = self.waiting[0]
            matched = []
            end = request.num_tokens - 1 if request.output_token_ids else len(request.prompt_token_ids)
            if not request.needs_all_prompt_rows:
                matched = self.allocator.match(request.token_ids[:end])
            fresh = self.allocator.allocate(self._num_pages(request) - len(matched))
            if fresh is None:
                self.allocator.release(reversed(matched))
                return
            self.waiting.popleft()
            request.pages = matched + fresh
            request.begin_prefill(len(matched) * self.config.page_size)
            self.pool.admit(request)
            self.pool.set_pages(request)
            self.running.append(request)

    def _num_pages(self, request: RequestState) -> int:
        """Pages for every token that a step launched now may leave behind, and for the step's own window."""
        slots = request.max_num_tokens + self.config.reserved_slots
        return pages_for(slots, self.config.page_size)

    def _extend_batch(self, prefilling: list[RequestState]) -> Batch:
        batch = Batch("extend", [])
        budget = self.config.chunk_size
        for request in prefilling:
            length = min(budget, request.prefill_end - request.num_computed)
            if length == 0:
                break
            budget -= length
            batch.requests.append(request)
            batch.starts.append(request.num_computed)
            batch.chunk_lens.append(length)
            request.num_computed += length
            batch.ends_prefill.append(not request.prefilling)
            batch.samples.append(not request.prefilling and not request.output_token_ids)
        return batch

    def _decode_batch(self, decoding: list[RequestState], drain: Callable[[], None]) -> Batch | None:
        preempted: list[str] = []
        scheduled: list[RequestState] = []
        for request in decoding:
            while request.status is Status.RUNNING and not self._grow(request):
                drain()
                if request.finished or self._grow(request):
                    break
                victim = max(self._preemptable(), key=lambda candidate: candidate.arrival)
                self.preempt(victim)
                preempted.append(victim.owner)
            scheduled.append(request)
        scheduled = [r for r in scheduled if r.status is Status.RUNNING]
        if not scheduled:
            return None
        return Batch("decode", scheduled, preempted=preempted)

    def _preemptable(self) -> Iterator[RequestState]:
        return (request for request in self.running if not request.finished)

    def _grow(self, request: RequestState) -> bool:
        missing = self._num_pages(request) - len(request.pages)
        if missing > 0:
            fresh = self.allocator.allocate(missing)
            if fresh is None:
                return False
            request.pages += fresh
            self.pool.set_pages(request)
        return True

    def preempt(self, request: RequestState) -> None:
        """Take a running request's row and pages; it goes back to the head of the queue."""
        assert request.pending == 0, f"{request.owner} is preempted with {request.pending} results on their way"
        self._release(request)
        request.status = Status.WAITING
        if not request.prompt_delivered:
            request.prefill_hidden.clear()
            request.prompt_logprobs.clear()
            if request.pooled is not None:
                request.pooled.start_again()
        # Keep arrival order in the queue whatever the order of preemptions.
        position = sum(other.arrival < request.arrival for other in self.waiting)
        self.waiting.insert(position, request)

    def finish(self, request: RequestState) -> None:
        """Called once a finished request has no result on its way: give everything back."""
        assert request.finished
        assert request.pending == 0
        if request in self.waiting:
            self.waiting.remove(request)
        elif request.row >= 0:
            self._release(request)

    def share_prefix(self, request: RequestState) -> None:
        """Offer the request's full pages to the prefix cache."""
        self.allocator.insert(request.pages, request.token_ids, request.num_final)

    def _release(self, request: RequestState) -> None:
        self.share_prefix(request)
        self.running.remove(request)
        self.allocator.release(reversed(request.pages))
        request.pages = []
        self.pool.release(request)
