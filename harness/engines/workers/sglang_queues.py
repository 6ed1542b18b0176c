"""What SGLang's parts take for sockets when they live in one process."""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable
from typing import Any


class Queue:
    """What SGLang takes for a socket. Who receives gets a copy, as from a socket."""

    def __init__(self) -> None:
        self.messages: deque[Any] = deque()

    def send_pyobj(self, message: Any, flags: int = 0, protocol: int = 0) -> None:
        del flags, protocol
        self.messages.append(copy.deepcopy(message))

    def recv_pyobj(self, flags: int = 0) -> Any:
        import zmq

        del flags
        if not self.messages:
            raise zmq.Again
        return self.messages.popleft()


class Inbox(Queue):
    """The scheduler's. It asks until nothing is left: the first time in a step, `between` puts there what is due."""

    def __init__(self) -> None:
        super().__init__()
        self.between: Callable[[], None] = lambda: None
        self._asking = False

    def recv_pyobj(self, flags: int = 0) -> Any:
        if not self._asking:
            self._asking = True
            self.between()
        self._asking = bool(self.messages)
        return super().recv_pyobj(flags)


class AsyncQueue(Queue):
    """The tokenizer's: it waits."""

    def __init__(self) -> None:
        super().__init__()
        self._new = asyncio.Event()

    def send_pyobj(self, message: Any, flags: int = 0, protocol: int = 0) -> None:
        super().send_pyobj(message, flags, protocol)
        self._new.set()

    async def recv_pyobj(self, flags: int = 0) -> Any:
        while not self.messages:
            self._new.clear()
            await self._new.wait()
        return super().recv_pyobj(flags)
