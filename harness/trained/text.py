"""The text that the tiny models are trained on: short documents of five kinds, as bytes, each ended by EOS.

A document is held out when its hash says so, wherever it comes up: training never sees the beginning of a prompt's own
continuation. Everything follows from a seed and an index, so that a run can be resumed at any step.
"""

from __future__ import annotations

import hashlib
import json
import random
import string
from collections.abc import Callable, Iterator
from itertools import count, islice

EOS = 256
VOCAB_SIZE = 257
ALPHABET = (*map(ord, "\n" + string.printable[:95]), EOS)
"""Ids that documents may hold, in no particular order: printable ASCII, the line feed and EOS."""
HELD_OUT_SHARE = 16
"""One document in so many is held out."""

ADJECTIVES = ("red", "small", "quiet", "old", "green", "happy", "clever", "tired")
ANIMALS = ("fox", "cat", "dog", "owl", "bear", "duck", "horse", "mouse")
VERBS = ("sleeps", "waits", "sings", "plays", "hides", "runs")
PLACES = ("river", "garden", "forest", "house", "bridge", "market", "hill", "window")
FOODS = ("bread", "apples", "honey", "fish", "berries", "cheese")
NAMES = ("anna", "ben", "clara", "david", "emma", "frank", "grace", "henry")
CITIES = ("berlin", "paris", "madrid", "oslo", "rome", "vienna")
FIELDS = ("total", "value", "price", "size", "speed", "count")
OPERATIONS = (("add", "+"), ("subtract", "-"), ("multiply", "*"))
SYMBOLS = ("ab", "xyz", "na", "tick tock", "one two three", "la la", "10", "=-", "<>", "abc abd")


def sentences(rng: random.Random) -> str:
    """A short tale about one animal."""
    animal, adjective, place = rng.choice(ANIMALS), rng.choice(ADJECTIVES), rng.choice(PLACES)
    lines = [f"The {adjective} {animal} lives near the {place}."]
    for _ in range(rng.randrange(1, 4)):
        lines.append(
            rng.choice(
                (
                    f"Every day the {animal} {rng.choice(VERBS)} by the {place}.",
                    f"The {animal} likes {rng.choice(FOODS)} and {rng.choice(FOODS)}.",
                    f"At night the {animal} {rng.choice(VERBS)} in the {rng.choice(PLACES)}.",
                )
            )
        )
    return " ".join(lines) + f" That is the story of the {adjective} {animal}."


def records(rng: random.Random) -> str:
    """A JSON list of one to three objects of the same form."""
    first = rng.randrange(1, 90)
    rows = []
    for number in range(first, first + rng.randrange(1, 4)):
        name = rng.choice(NAMES)
        row: dict[str, object] = {"id": number, "name": name, "city": rng.choice(CITIES)}
        row |= {"email": f"{name}@example.com", "active": rng.random() < 0.5}
        rows.append(row)
    return json.dumps(rows)


def arithmetic(rng: random.Random) -> str:
    """The rows of one table: sums with, or products by, the same number."""
    base, start, times = rng.randrange(2, 10), rng.randrange(0, 5), rng.random() < 0.5
    rows = range(start, start + rng.randrange(4, 9))
    return "\n".join(f"{n} * {base} = {n * base}" if times else f"{n} + {base} = {n + base}" for n in rows)


def code(rng: random.Random) -> str:
    """A function in the style of Python, and a call of it."""
    field, name = rng.choice(FIELDS), rng.choice(NAMES)
    verb, sign = rng.choice(OPERATIONS)
    return rng.choice(
        (
            f"def {verb}_{field}({field}, other):\n    return {field} {sign} other\n\n"
            f"print({verb}_{field}({rng.randrange(10)}, {rng.randrange(10)}))",
            f"def get_{field}(items):\n    {field} = 0\n    for item in items:\n"
            f"        {field} = {field} {sign} item.{field}\n    return {field}",
            f"class {name.title()}:\n    def __init__(self, {field}):\n        self.{field} = {field}\n\n"
            f"    def get_{field}(self):\n        return self.{field}",
        )
    )


def repetition(rng: random.Random) -> str:
    """The same few characters again and again, or numbers that count up."""
    times = rng.randrange(5, 15)
    if rng.random() < 0.5:
        start = rng.randrange(1, 80)
        return ", ".join(map(str, range(start, start + times)))
    letters = "".join(rng.choices(string.ascii_lowercase, k=rng.randrange(2, 5)))
    unit = rng.choice((*SYMBOLS, rng.choice(NAMES), letters))
    return rng.choice((" ", "", "-", ", ")).join([unit] * times)


KINDS: tuple[Callable[[random.Random], str], ...] = (sentences, records, arithmetic, code, repetition)


def is_held_out(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_SHARE == 0


def encode(text: str) -> tuple[int, ...]:
    """UTF-8 bytes, one token each."""
    return tuple(text.encode())


def documents(seed: str, *, held_out: bool) -> Iterator[str]:
    """Texts of all kinds in turn, without end."""
    rng = random.Random(seed)
    for number in count(rng.randrange(len(KINDS))):
        text = KINDS[number % len(KINDS)](rng)
        if is_held_out(text) == held_out:
            yield text


def window(seed: int, index: int, length: int) -> list[int]:
    """Token ids of training window `index`: whole documents, the last one cut at `length` ids."""
    ids: list[int] = []
    for text in documents(f"train-{seed}-{index}", held_out=False):
        ids += (*encode(text), EOS)
        if len(ids) >= length:
            break
    return ids[:length]


def prompts(number: int, seed: int = 0, shortest: int = 16, longest: int = 40) -> list[tuple[int, ...]]:
    """Beginnings of held-out documents, of `shortest` to `longest` ids, the kinds in turn."""
    rng = random.Random(seed)
    texts = (text for text in documents(f"prompts-{seed}", held_out=True) if len(text) > longest)
    return [encode(text)[: rng.randint(shortest, longest)] for text in islice(texts, number)]
