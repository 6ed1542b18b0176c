"""SGLang behind the wire: its `Engine`, with scheduler and detokenizer in this process instead of two of their own, so
that it starts fast and can be stepped.

Nothing of SGLang is changed. What its parts send each other goes through queues in the place of sockets. The
scheduler's own event loop runs; it asks its queue for requests once in each step, and what is due between two steps is
done then. A probe around the method that reads a verification's result notes what was accepted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import sys
import traceback
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "sgl_kernel_cpu"))

from sglang_queues import AsyncQueue, Inbox, Queue
from wire import Refused, Tensors, serve

MODULES = (
    "sglang.srt.constrained.xgrammar_backend",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.layers.attention.intel_amx_backend",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.registry",
    "sglang.srt.speculative.eagle_worker_v2",
    "sglang.srt.speculative.ngram_worker",
    "sglang.srt.speculative.standalone_worker_v2",
)
"""What a start would import otherwise, at seconds each time."""
TICKS = 20
"""Turns of the event loop in which tasks do all that they can do without a new message."""
PATIENCE = 1000
"""Steps in which the scheduler must be rid of requests that were aborted because a run ended."""


class Served:
    """One `Engine`."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.parts: Parts | None = None
        self.steps: Steps | None = None
        self.broken = False

    def load(self) -> None:
        # The compiled part of torchvision is dead beside a CPU build of torch.
        sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")
        for name in ("sgl_kernel", *MODULES):
            import_module(name)

    def start(self, words: dict[str, Any]) -> dict[str, Any]:
        from sglang.srt.runtime_context import get_platform

        # Only the backend that calls `sgl_kernel` verifies drafts; SGLang takes it where the processor has AMX.
        get_platform()._install(has_amx=True)
        try:
            self.engine, self.parts = _started(words)
        except (ValueError, NotImplementedError, AssertionError, OSError) as error:
            traceback.print_exc()
            raise Refused(f"{type(error).__name__}: {error}") from error
        self.steps = Steps(self.parts.scheduler)
        return {}

    def run(self, order: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
        if order["actions"]:
            raise Refused(f"{order['actions'][0]['name']}: nothing is done to SGLang while it generates")
        if self.broken:
            raise RuntimeError("an earlier run broke the engine")
        assert self.parts is not None
        assert self.steps is not None
        self.steps.seen.clear()
        self.broken = True
        session = Session(self.engine, self.parts, order["requests"], order["max_steps"])
        idle = session.run()
        self.broken = False
        session.raise_declined()
        completions = [
            self._completion(request, index, answer, tensors)
            for request in order["requests"]
            for index, answer in enumerate(session.answers(request["id"]))
        ]
        return {"completions": completions, "idle": idle}

    def _completion(
        self, request: dict[str, Any], index: int, answer: dict[str, Any], tensors: Tensors
    ) -> dict[str, Any]:
        assert self.steps is not None
        prompt, meta = request["prompt_token_ids"], answer["meta_info"]
        tokens = list(answer["output_ids"])
        usage = {
            "prompt_tokens": meta.get("prompt_tokens", len(prompt)),
            "completion_tokens": meta.get("completion_tokens", len(tokens)),
            "cached_tokens": meta.get("cached_tokens", 0),
        }
        finish = meta["finish_reason"]
        return {
            "request_id": request["id"],
            "index": index,
            "prompt_token_ids": prompt,
            "token_ids": tokens,
            "finish_reason": finish["type"] if finish else None,
            "usage": usage,
            "text": answer["text"],
            "logprobs": _rows(meta, "output", request["logprobs"]),
            "prompt_logprobs": _rows(meta, "input", request["prompt_logprobs"]),
            "hidden_states": _hidden(meta.get("hidden_states"), tensors),
            **self.steps.of(meta["id"]),
        }

    def reset(self) -> None:
        assert self.parts is not None
        if self.broken or not self.parts.scheduler.flush_cache():
            raise RuntimeError("the engine is not idle: its caches cannot be emptied")

    def stop(self) -> None:
        self.engine = None


class Parts:
    """Scheduler and detokenizer, and the queues between them and the tokenizer."""

    def __init__(self, server_args: Any, port_args: Any) -> None:
        from sglang.srt.managers.detokenizer_manager import DetokenizerManager
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.runtime_context import SpawnRanks, publish

        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
        self.scheduler = Scheduler(server_args, port_args)
        self.detokenizer = DetokenizerManager(server_args, port_args)
        self.inbox, self.to_detokenizer = Inbox(), Queue()
        self.to_tokenizer: Queue | None = None
        receiver = self.scheduler.request_receiver
        self.scheduler.request_receiver = dataclasses.replace(receiver, recv_from_tokenizer=self.inbox)
        self.scheduler.ipc_channels.send_to_detokenizer.socket = self.to_detokenizer

    def join(self, tokenizer: Any) -> None:
        self.to_tokenizer = AsyncQueue()
        self.scheduler.ipc_channels.send_to_tokenizer.socket = self.to_tokenizer
        tokenizer.send_to_scheduler = self.inbox
        tokenizer.recv_from_detokenizer = self.to_tokenizer

    def detokenize(self) -> None:
        """What `DetokenizerManager.event_loop` does, as far as there are messages."""
        from sglang.srt.managers.io_struct import sock_recv, sock_send

        while self.to_detokenizer.messages:
            output = self.detokenizer._request_dispatcher(sock_recv(self.to_detokenizer))
            if output is not None:
                sock_send(self.to_tokenizer, output)


def _started(words: dict[str, Any]) -> tuple[Any, Parts]:
    """SGLang's `Engine`, whose methods that launch processes make their parts here instead."""
    from sglang.srt.entrypoints.engine import Engine, SchedulerInitResult

    made: list[Parts] = []

    class InProcess(Engine):  # type: ignore[misc]
        @classmethod
        def _launch_scheduler_processes(cls, server_args: Any, port_args: Any, *_: Any, **__: Any) -> Any:
            infos: list[Any] = []

            def make() -> None:
                # After the tokenizer: whoever publishes the configuration last has it, with what it then overrides.
                made.append(Parts(server_args, port_args))
                infos.append(made[0].scheduler.get_init_info())

            return SchedulerInitResult(scheduler_infos=infos, wait_for_ready=make), []

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> Any:
            return [], []

    engine = InProcess(**words)
    made[0].join(engine.tokenizer_manager)
    engine.loop.run_until_complete(_listening(engine.tokenizer_manager))
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # its own handlers wait for the event loop: nobody could end this process
    return engine, made[0]


class Session:
    """One run: requests come and are aborted at their steps."""

    def __init__(self, engine: Any, parts: Parts, requests: list[dict[str, Any]], max_steps: int) -> None:
        self._engine, self._parts = engine, parts
        self._requests, self._waiting = requests, list(requests)
        self._max_steps = max_steps
        self._step = 0
        self._ended: int | None = None  # the step before which all were aborted
        self._tasks: dict[str, asyncio.Task[Any]] = {}

    def run(self) -> bool:
        """Until all are answered, one is declined, or `max_steps` are over -> whether all are answered."""
        scheduler = self._parts.scheduler
        scheduler.gracefully_exit = False
        self._parts.inbox.between = self._between
        scheduler.run_event_loop()
        return self._ended is None

    def raise_declined(self) -> None:
        """What became of a request that has no answer."""
        for name, error in self._errors():
            if isinstance(error, ValueError):
                raise Refused(f"request {name!r}: {error}") from error
            raise error

    def _errors(self) -> list[tuple[str, BaseException]]:
        ended = [(name, task.exception()) for name, task in self._tasks.items() if task.done()]
        return [(name, error) for name, error in ended if error is not None]

    def answers(self, request_id: str) -> list[dict[str, Any]]:
        """One per sample; none when the request was not finished."""
        task = self._tasks.get(request_id)
        answer = task.result() if task is not None and task.done() else []
        told = answer if isinstance(answer, list) else [answer]
        return [one for one in told if one["meta_info"]["finish_reason"]]

    def _between(self) -> None:
        """Before a step: bring answers home, then what is due."""
        self._settle()
        tokenizer = self._engine.tokenizer_manager
        if self._ended is None:
            for request in [one for one in self._waiting if one["arrival_step"] <= self._step]:
                self._waiting.remove(request)
                self._tasks[request["id"]] = self._engine.loop.create_task(self._answer(request))
            self._settle()
            for request in self._requests:
                if request["abort_step"] == self._step and request["id"] in self._tasks:
                    tokenizer.abort_request(request["id"])
        elif self._step > self._ended + PATIENCE:
            raise RuntimeError(f"requests that were aborted are still there after {PATIENCE} steps")
        self._settle()
        if self._ended is None and (self._errors() or self._step >= self._max_steps):
            self._ended, self._waiting = self._step, []
            tokenizer.abort_request(abort_all=True)
        self._parts.scheduler.gracefully_exit = self._over
        self._step += 1

    async def _answer(self, request: dict[str, Any]) -> Any:
        """One answer, or one per sample. Only a streamed one has the tokens that came before SGLang itself gave up; its
        last chunk is the whole."""
        words = {**request["generate"], **self._logprobs(request)}
        answer = await self._engine.async_generate(rid=request["id"], **words)
        if words["stream"]:
            last: dict[int, Any] = {}
            async for chunk in answer:
                last[chunk.get("index", 0)] = chunk
            return [last[index] for index in sorted(last)]
        return answer

    def _logprobs(self, request: dict[str, Any]) -> dict[str, Any]:
        asked = [num for num in (request["logprobs"], request["prompt_logprobs"]) if num is not None]
        if not asked:
            return {}
        start = -1 if request["prompt_logprobs"] is None else 0
        whole = list(range(self._engine.tokenizer_manager.model_config.vocab_size))
        wanted = {"top_logprobs_num": max(asked), "logprob_start_len": start, "token_ids_logprob": whole}
        return {"return_logprob": True, **wanted}

    @property
    def _over(self) -> bool:
        answered = not self._waiting and all(task.done() for task in self._tasks.values())
        return answered and self._parts.scheduler.is_fully_idle()

    def _settle(self) -> None:
        """Let the tokenizer and the requests' tasks do what they can without a new message."""
        self._parts.detokenize()
        self._engine.loop.run_until_complete(_ticks())


async def _listening(tokenizer: Any) -> None:
    tokenizer.auto_create_handle_loop()


async def _ticks() -> None:
    for _ in range(TICKS):
        await asyncio.sleep(0)


class Steps:
    """What each verification accepted, by request."""

    def __init__(self, scheduler: Any) -> None:
        self.speculative = not scheduler.spec_algorithm.is_none()
        self.seen: dict[str, list[tuple[int, int]]] = {}
        self._drafts = (scheduler.server_args.speculative_num_draft_tokens or 1) - 1
        # A class takes the probe where its frozen instance does not; there is one instance in a process.
        processor = type(scheduler.batch_result_processor)
        resolve = processor._resolve_spec_v2_tokens

        def watched(self_: Any, result: Any, batch: Any) -> Any:
            self._note(result, batch)
            return resolve(self_, result, batch)

        processor._resolve_spec_v2_tokens = watched

    def of(self, request_id: str) -> dict[str, Any]:
        if not self.speculative:
            return {}
        steps = self.seen.get(request_id, [])
        return {"accept_lens": [accepted for accepted, _ in steps], "draft_lens": [drafted for _, drafted in steps]}

    def _note(self, result: Any, batch: Any) -> None:
        for request, accepted in zip(batch.reqs, result.accept_lens.tolist(), strict=True):
            if not request.finished() and not request.is_retracted:
                self.seen.setdefault(request.rid, []).append((accepted, self._drafts))


def _rows(meta: dict[str, Any], side: str, num_top: int | None) -> list[Any] | None:
    """SGLang lists [logprob, token, text] per position, and gives no rank: it is counted in the logprobs of the whole
    vocabulary, which were asked for too. The first prompt token has no row. Who was aborted in the queue has no prompt
    rows at all."""
    if num_top is None or (side == "input" and not meta[f"{side}_token_logprobs"]):
        return None
    told: list[Any] = []
    whole = meta[f"{side}_token_ids_logprobs"]
    best = meta.get(f"{side}_top_logprobs") or [None] * len(whole)
    for at, (logprob, token, _) in enumerate(meta[f"{side}_token_logprobs"]):
        if logprob is None:
            told.append(None)
            continue
        rank = 1 + sum(other > logprob for other, _, _ in whole[at])
        top = [[token, value] for value, token, _ in (best[at] or ())[:num_top]]
        told.append({"token_id": token, "logprob": logprob, "rank": rank, "top": top})
    return told


def _hidden(entries: Any, tensors: Tensors) -> dict[str, Any] | None:
    """SGLang's entry 0 is the prompt's block, each further one a row."""
    import torch

    if not entries:
        return None
    block, *rows = (torch.as_tensor(entry, dtype=torch.float32) for entry in entries)
    return {"prefill": tensors(block), "decode": [tensors(row) for row in rows]}


if __name__ == "__main__":
    serve(Served(), {"name": "sglang", "version": version("sglang")})
