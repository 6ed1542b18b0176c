"""An OpenAI-compatible server behind the wire. It is started here by a command, or runs already; it is asked over HTTP
and nothing of it is looked into.

The requests of a batch go out together, each on a connection of its own. What the server rejects is refused; what it
breaks, drops or garbles is a failure, and so is one that takes too long.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from http_json import HttpError, NoAnswer, Nonsense, call, fetch
from openai_answers import NoCompletion, Pieces, completions, counters
from server_process import ServerFailure, ServerProcess, declines
from wire import Refused, Tensors, refuse_ours, renamed, serve

TOGETHER = 64
"""Requests that are on their way at the same time."""
NOT_THE_REQUEST = frozenset({401, 403, 404, 405, 408, 429})
"""Rejections that say nothing about what was asked: no key, no such path, no time, too much at once."""
DYING = 1.0
"""Seconds in which a server that broke a connection may turn out to be dead."""
TRIES, LONGEST_WAIT = 4, 5.0
"""How often a server that is too busy is asked, and the seconds that are waited between."""


class Served:
    """One server."""

    def __init__(self) -> None:
        self.words: dict[str, Any] = {}
        self.process: ServerProcess | None = None
        self.pieces: Pieces | None = None
        self.address = self.model = ""
        self.broken = ""

    def load(self) -> None:
        """There is nothing to import."""

    def start(self, words: dict[str, Any]) -> dict[str, Any]:
        refuse_ours(words["target"])
        self.words = words
        self.pieces = Pieces(Path(words["target"]))
        self._start()
        return {}

    def _start(self) -> None:
        words = self.words
        self.address = words["address"]
        if words["command"]:
            places, drafter = dict(words["places"]), words["places"].get("drafter")
            if drafter and words["renamed"]:
                places["drafter"] = renamed(Path(drafter), words["renamed"])
            how = (words["environment"], words["health"], declines(words["refusals"]), words["patience"])
            self.process = ServerProcess(words["command"], places, *how)
            self.address = self.process.address
        served = self._told("GET", "/v1/models", None).get("data") or [{}]
        self.model = str(served[0].get("id", ""))

    def run(self, order: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
        del tensors
        if order["actions"]:
            raise Refused(f"{order['actions'][0]['name']}: nothing is done to a server while it generates")
        before = self._counters()
        requests = order["requests"]
        with ThreadPoolExecutor(TOGETHER) as pool:
            asked = [pool.submit(self._completions, request) for request in requests]
        refused = [error for one in asked if isinstance(error := one.exception(), Refused)]
        for one in asked:
            if one.exception() not in (None, *refused):
                one.result()
        if refused:
            raise refused[0]
        answer: dict[str, Any] = {"completions": [done for one in asked for done in one.result()], "idle": True}
        after = self._counters()
        # Without the steps of every request there is nothing that they could be the sum of.
        whole = all("accept_lens" in done for done in answer["completions"])
        if before is not None and after is not None and whole:
            answer["counters"] = {name: _less(value, before[name]) for name, value in after.items()}
        return answer

    def _completions(self, request: dict[str, Any]) -> list[Any]:
        assert self.pieces is not None
        body = {**request["body"], "model": self.model, "prompt": request["prompt_token_ids"]}
        for field, sequences in request["as_text"].items():
            body[field] = [self.pieces.text_of(one) for one in sequences]
        name = f"request {request['id']!r}"
        try:
            answer = self._told("POST", "/v1/completions", body)
            made: list[Any] = completions(request, answer, self.words["form"], self.pieces)
            return made
        except Refused as refusal:
            raise Refused(f"{name}: {refusal}") from refusal
        except ServerFailure as error:
            raise ServerFailure(f"{name}: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = str(error) if isinstance(error, NoCompletion) else f"{type(error).__name__}: {error}"
            raise self._failure(f"{name}: the server answered nonsense: {what}") from error

    def _told(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        """The answer of the server, which is given time when it is too busy. Raises `Refused`, `ServerFailure`."""
        asked = (self.address, method, path, body, self.words["silence"], self._headers())
        for attempt in range(1, TRIES + 1):
            try:
                answer: dict[str, Any] = call(*asked)
                return answer
            except HttpError as said:
                if said.status == 429 and attempt < TRIES:
                    time.sleep(min(said.retry_after or 0.1 * 2**attempt, LONGEST_WAIT))
                elif 400 <= said.status < 500 and said.status not in NOT_THE_REQUEST:
                    raise Refused(said.reason) from said
                else:
                    raise self._failure(f"{method} {path}: {said}{self._hint(said.status)}") from said
            except NoAnswer as error:
                death = self.process.death(DYING) if self.process is not None else ""
                raise self._failure(f"{death} ({error})" if death else f"no answer to {error}") from error
            except Nonsense as error:
                raise self._failure(f"nonsense was answered to {error}") from error
        raise AssertionError("the last attempt returns or raises")

    def _headers(self) -> dict[str, str]:
        key = os.environ.get(self.words["api_key_env"], "") if self.words["api_key_env"] else ""
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _hint(self, status: int) -> str:
        if status in (401, 403):
            named = self.words["api_key_env"]
            return f" (api_key_env = {named!r}: is the variable set?)" if named else " (name the key's api_key_env)"
        return f" (asked {TRIES} times)" if status == 429 else ""

    def _failure(self, what: str) -> ServerFailure:
        """One after which the server is not used again."""
        self.broken = what.partition("\n")[0]
        return ServerFailure(what + (f"\n{self.process.tail()}" if self.process is not None else ""))

    def _counters(self) -> dict[str, Any] | None:
        if not self.words["counters"]:
            return None
        try:
            text = fetch(self.address, "GET", self.words["metrics"], None, self.words["silence"], self._headers())
            found: dict[str, Any] = counters(text, self.words["counters"])
            return found
        except (NoAnswer, HttpError, NoCompletion) as error:
            raise self._failure(f"its counters cannot be read: {error}") from error

    def reset(self) -> None:
        """Empty its caches, by its own command where it has one; else a server of ours is started anew."""
        if self.broken:
            raise ServerFailure(f"it is not used again: {self.broken}")
        if self.words["reset"]:
            fetch(self.address, "POST", self.words["reset"], None, self.words["silence"], self._headers())
        elif self.process is not None:
            self.stop()
            self._start()

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
            self.process = None


def _less(now: Any, then: Any) -> Any:
    if not isinstance(now, list):
        return now - then
    return [one - (then[place] if place < len(then) else 0) for place, one in enumerate(now)]


if __name__ == "__main__":
    served = Served()
    try:
        serve(served, {"name": "openai", "version": ""})
    finally:
        served.stop()  # also when the harness goes in the middle of an answer
