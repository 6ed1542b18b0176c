"""Engines that are kept for the next one who wants the same: to start a real one takes seconds."""

from __future__ import annotations

from collections import OrderedDict

from harness.engines.isolated.process import EngineFailure, Worker


class Pool:
    """Workers whose engine nobody uses at the moment, by what it was started with; the `room` given back last."""

    def __init__(self, room: int) -> None:
        assert room >= 0, f"room={room}"
        self._room = room
        self._idle: OrderedDict[str, Worker] = OrderedDict()

    def take(self, key: str, deadline: float) -> Worker | None:
        """A worker with such an engine, its caches emptied; None when there is none that lives and can do that."""
        worker = self._idle.pop(key, None)
        if worker is None:
            return None
        try:
            reply, _ = worker.ask({"ask": "reset"}, deadline)
        except EngineFailure:
            return None
        if reply.get("reply") != "done":
            worker.close()
            return None
        return worker

    def give(self, key: str, worker: Worker) -> None:
        """Keep it. Of two with one key the newer stays, and beyond `room` the one unused longest ends."""
        older = self._idle.pop(key, None)
        self._idle[key] = worker
        for one in (older, *(self._idle.popitem(last=False)[1] for _ in range(len(self._idle) - self._room))):
            if one is not None:
                one.close()

    def close(self) -> None:
        while self._idle:
            self._idle.popitem()[1].close()
