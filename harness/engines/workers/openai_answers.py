"""What an OpenAI-compatible server answers, as completions of the contract. Packaging is translated; numbers are passed
on as they came, and what is missing stays missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

IMPOSSIBLE = -9999.0
"""What stands for minus infinity in the answers, as JSON has none."""
BY_ID = "token_id:"
"""What begins a token that is named by its id."""


class NoCompletion(ValueError):
    """An answer out of which no completion can be read; says what is missing in it."""


class Pieces:
    """The text of each token, as the `tokenizer.json` of a checkpoint has it."""

    def __init__(self, model: Path) -> None:
        told = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))
        self._ids: dict[str, int] = dict(told["model"]["vocab"])
        special = {one["content"]: one["id"] for one in told["added_tokens"]}
        self._ids |= special
        self._texts = {token_id: text for text, token_id in self._ids.items()}
        self._ends = list(special.values())

    def id_of(self, text: str) -> int:
        """Raises `NoCompletion` for what is no token."""
        if text.startswith(BY_ID):
            return int(text.removeprefix(BY_ID))
        if text not in self._ids:
            raise NoCompletion(f"{text!r} is no token of the checkpoint")
        return self._ids[text]

    def text_of(self, token_ids: Sequence[int]) -> str:
        return "".join(self._texts.get(token_id, "") for token_id in token_ids)

    def spelt(self, text: str, count: int, ended: bool) -> list[int]:
        """`count` tokens that spell a text, each one character. One more than it spells, of a request that `ended` by
        itself, is the end token: it has no text. Raises `NoCompletion` where they are not known so."""
        ids = [self.id_of(letter) for letter in text]
        if len(ids) == count - 1 and ended and len(self._ends) == 1:
            ids += self._ends
        if len(ids) != count:
            raise NoCompletion(f"{count} tokens are billed and {len(ids)} are spelt by the text {text!r}")
        return ids


def completions(request: dict[str, Any], answer: dict[str, Any], form: dict[str, Any], pieces: Pieces) -> list[Any]:
    """One for each choice, in their order. `form` says where things stand in the answers of this server. Raises
    `NoCompletion`."""
    choices, usage = _part(answer, "choices", list), _part(answer, "usage", dict)
    echoed = len(request["prompt_token_ids"]) if request["body"].get("echo") else 0
    tokens = [_tokens(one, usage, form, pieces, echoed) for one in choices]
    made = []
    for place, (choice, ids) in enumerate(zip(choices, tokens, strict=True)):
        rows = _rows(choice, pieces)
        # What is billed is billed for all samples together: the first one stands for what the others did not get.
        others = sum(len(other) for other in tokens) - len(ids)
        billed = usage.get("completion_tokens", 0) - others if place == 0 else len(ids)
        text = choice.get("text")
        made.append(
            {
                "request_id": request["id"],
                "index": choice.get("index", place),
                "prompt_token_ids": request["prompt_token_ids"],
                "token_ids": ids,
                "finish_reason": choice.get("finish_reason"),
                "usage": {
                    "prompt_tokens": usage.get("prompt_tokens"),
                    "completion_tokens": billed,
                    "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
                },
                "text": text[_echoed_text(request, pieces) if echoed else 0 :] if isinstance(text, str) else text,
                "logprobs": _cut(rows and rows[echoed:], request["logprobs"]),
                "prompt_logprobs": _prompt_rows(request, choice, rows, echoed),
                **_steps(answer, len(ids), form, len(choices)),
            }
        )
    return made


def at(answer: Any, path: str) -> Any:
    """What stands at a dotted path; None where there is nothing."""
    for name in path.split(".") if path else ():
        answer = answer.get(name) if isinstance(answer, dict) else None
    return answer if path else None


def counters(text: str, names: dict[str, str]) -> dict[str, Any]:
    """Counters in Prometheus' text form, summed over engines; those with a position are lists. Raises
    `NoCompletion` for one that is not there."""
    found: dict[str, dict[int, float]] = {name: {} for name in names.values()}
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        labels, closed, value = rest.rpartition("}")
        if closed and name in found:
            position = labels.partition('position="')[2].partition('"')[0]
            here = int(position or 0)
            found[name][here] = found[name].get(here, 0.0) + float(value)
    for name, values in found.items():
        if not values:
            raise NoCompletion(f"the metrics have no counter {name}")
    return {
        ours: [int(found[name].get(place, 0)) for place in range(1 + max(found[name]))]
        if ours == "accepted_per_position"
        else int(sum(found[name].values()))
        for ours, name in names.items()
    }


def _part(answer: dict[str, Any], name: str, kind: type) -> Any:
    found = answer.get(name)
    if not isinstance(found, kind):
        raise NoCompletion(f"the answer has no {name}; it has {', '.join(sorted(answer)) or 'nothing'}")
    return found


def _tokens(
    choice: dict[str, Any], usage: dict[str, Any], form: dict[str, Any], pieces: Pieces, echoed: int
) -> list[int]:
    if form["ids"] == "text":
        ended = choice.get("finish_reason") == "stop"
        return pieces.spelt(_part(choice, "text", str), usage.get("completion_tokens", 0), ended)
    if form["ids"] == "logprobs":
        return [pieces.id_of(text) for text in _part(_part(choice, "logprobs", dict), "tokens", list)[echoed:]]
    return list(_part(choice, form["ids"], list))


def _rows(choice: dict[str, Any], pieces: Pieces) -> list[Any] | None:
    """One for each token that the server lists; their `top` has all that it tells. It tells no ranks."""
    told = choice.get("logprobs")
    if not isinstance(told, dict):
        return None
    tokens, values = told.get("tokens") or [], told.get("token_logprobs") or []
    best = told.get("top_logprobs") or [None] * len(tokens)
    rows = []
    for text, value, top in zip(tokens, values, best, strict=False):
        pairs = sorted(((pieces.id_of(one), _number(other)) for one, other in (top or {}).items()), key=_order)
        row = {"token_id": pieces.id_of(text), "logprob": _number(value), "rank": None, "top": pairs}
        rows.append(None if value is None else row)
    return rows


def _prompt_rows(
    request: dict[str, Any], choice: dict[str, Any], rows: list[Any] | None, echoed: int
) -> list[Any] | None:
    """Beside the choice, by id and with ranks, as vLLM gives them; or in front of the others, of a prompt that is
    echoed."""
    asked = request["prompt_logprobs"]
    if asked is None:
        return None
    if echoed:
        return _cut(rows and rows[:echoed], asked)
    told = choice.get("prompt_logprobs")
    if not isinstance(told, list):
        return None
    made: list[Any] = []
    for token_id, row in zip(request["prompt_token_ids"], told, strict=False):
        own = (row or {}).get(str(token_id))
        best = sorted((one["rank"], int(name), _number(one["logprob"])) for name, one in (row or {}).items())[:asked]
        top = [(other, value) for _, other, value in best]
        made.append(own and {"token_id": token_id, "logprob": _number(own["logprob"]), "rank": own["rank"], "top": top})
    return made


def _cut(rows: list[Any] | None, asked: int | None) -> list[Any] | None:
    """Servers list the token itself beside the `asked` best ones."""
    if rows is None or asked is None:
        return None
    return [row and {**row, "top": row["top"][:asked]} for row in rows]


def _steps(answer: dict[str, Any], count: int, form: dict[str, Any], choices: int) -> dict[str, Any]:
    """Accept and draft lengths of the verify steps of a single sample; nothing where the server tells none of it. Steps
    without drafts are not listed: of a drafter that drafts in every step they are the last, where the context has no
    room for drafts. A list that would be empty is left out."""
    if not form["accepted"] or choices > 1 or at(answer, form["accepted"].rpartition(".")[0]) is None:
        return {}
    accepted, drafted = at(answer, form["accepted"]) or [], at(answer, form["drafted"]) or []
    bare = max(count - 1 - sum(accepted) - len(accepted), 0)
    return {"accept_lens": [one + 1 for one in accepted] + [1] * bare, "draft_lens": [*drafted, *([0] * bare)]}


def _echoed_text(request: dict[str, Any], pieces: Pieces) -> int:
    return len(pieces.text_of(request["prompt_token_ids"]))


def _number(value: Any) -> Any:
    return float("-inf") if isinstance(value, (int, float)) and value <= IMPOSSIBLE else value


def _order(pair: tuple[int, float]) -> tuple[float, int]:
    return -pair[1], pair[0]
