"""Every processor in every position of a block, chains and trees: the joint law of what `verify` emits is the target's,
with the options of the request applied after each path of drafts as if its tokens had been emitted one by one.

Coins are set just inside both ends of every interval between two thresholds of a right verifier, which the plain
float64 oracle knows, each with half of the interval's weight: the sum over all of them is the integral. Options have
short binary fractions, so that what the engine keeps in float32 is what was asked.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import contract
from harness.known_answer.tokenizer import write_tokenizer
from harness.oracles import sampling as oracle
from harness.oracles.grammar import canonical_grammar, following_ids
from reference_engine.config import EngineConfig, SpecConfig
from reference_engine.grammar import Grammars, draft_masks
from reference_engine.pool import RequestPool
from reference_engine.request import RequestState, SamplingParams
from reference_engine.sampling.processors import SamplingBatch
from reference_engine.sampling.random import Stream
from reference_engine.sampling.sampler import Window, verify
from reference_engine.verification.tree import tree_of
from suites.reference_engine.laws import (
    Laws,
    Tokens,
    chance,
    completed,
    distance,
    seeded_laws,
    sequences,
    target_law,
)
from suites.registration import suite

suite(seconds=2, stage="cpu", needs="cpu")

VOCAB, EOS = 5, 4
TEXTS = ("0", "1", "2", "3", "")
PROMPT, OUTPUT = (0, 3, 1), (2, 1)
NUDGE = 1e-9
TOLERANCE = 1e-6

OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.625},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.25},
    "repetition_penalty": {"repetition_penalty": 1.75},
    "presence_penalty": {"presence_penalty": 1.25},
    "frequency_penalty": {"frequency_penalty": 0.875},
    "logit_bias": {"logit_bias": ((1, 1.5), (3, -float("inf")))},
    "min_new_tokens": {"min_new_tokens": 4, "stop_token_ids": (0,)},
    "bad_words": {"bad_words": ((2,), (1, 0), (1, 1, 3), (3, 1), (0, 0, 0), (1, 2, 1, 3))},
    "allowed_token_ids": {"allowed_token_ids": (0, 1, 3)},
    "regex": {"regex": "21[02](0[13]|[12]0)[0-3]{4}"},
    "all": {
        "temperature": 1.25,
        "top_k": 4,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 0.75,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.375,
        "logit_bias": ((1, 0.5),),
        "min_new_tokens": 4,
        "bad_words": ((1, 3), (2, 0, 1)),
        "allowed_token_ids": (0, 1, 2, 4),
    },
}
CHAINS = ((0, 1), (1, 1), (2, -1))
TREES: dict[str, tuple[Tokens, Tokens]] = {
    "under both": ((0, 1, 2, 0), (0, 0, 1, 2)),
    "deep and twins": ((1, 1, 0), (0, 0, 2)),
}
"""Tokens and parents, as nodes: 0 is the root."""


@cache
def raw_logits(path: Tokens) -> tuple[float, ...]:
    rng = random.Random(f"{path}")
    return tuple(rng.randrange(-16, 17) / 8 for _ in range(VOCAB))


def law_under(fields: dict[str, Any]) -> Laws:
    """Path of drafts -> the law of the token after it, by the oracle."""
    params = contract.SamplingParams(**fields)
    grammar = canonical_grammar(params)

    @cache
    def law(path: Tokens) -> tuple[float, ...]:
        ids = None
        if grammar is not None:
            text = "".join(TEXTS[token] for token in OUTPUT + path)
            ids = following_ids(grammar.after(text), TEXTS, (EOS,))
        history = oracle.History(PROMPT, OUTPUT + path)
        stops = {*params.stop_token_ids, EOS}
        try:
            found = oracle.next_token_law(raw_logits(path), params, history, stop_ids=stops, following_ids=ids)
        except oracle.NothingLeft:
            return (0.0,) * VOCAB
        return tuple(found.tolist())

    return law


def points(thresholds: Iterable[float]) -> list[tuple[float, float]]:
    """Coins and their weights, which sum to 1."""
    lines = sorted({0.0, 1.0, *(t for t in thresholds if 0 < t < 1)})
    cells = [(a, b) for a, b in itertools.pairwise(lines) if b - a > 4 * NUDGE]
    return [(place, (b - a) / 2) for a, b in cells for place in (a + NUDGE, b - NUDGE)]


class Coins:
    """A random source: one column of coins for each (stream, depth)."""

    def __init__(self, columns: dict[tuple[int, int], torch.Tensor], start: int) -> None:
        self.columns, self.start = columns, start

    def uniform(self, seeds: torch.Tensor, positions: torch.Tensor, stream: int) -> torch.Tensor:
        unused = torch.full((len(seeds),), 0.5, dtype=torch.float64)
        depths = (positions[0] - self.start).tolist()
        return torch.stack([self.columns.get((int(stream), depth), unused) for depth in depths], dim=1)


def cumulated(law: Sequence[float]) -> list[float]:
    total = sum(law)
    return [sum(law[: i + 1]) / total for i in range(len(law))] if total > 0 else []


def window_of(
    fields: dict[str, Any], rows: int, coins: Coins, drafts: Tokens, parents: Tokens | None, folder: Path
) -> tuple[Window, torch.Tensor]:
    """`rows` times the same request, and its drafts [rows, n - 1], less those that its grammar makes pointless."""
    spec = SpecConfig(
        method="CUSTOM",
        num_steps=len(drafts),
        topk=1 if parents is None else 2,
        num_draft_tokens=len(drafts) + 1,
        draft_sample_method="probabilistic" if parents is None else "greedy",
    )
    config = EngineConfig(model=folder, spec=spec, max_running=rows, context_length=32, page_size=16)
    pool = RequestPool(config, VOCAB)
    committed = PROMPT + OUTPUT
    pool.token_ids[:, : len(committed)] = torch.tensor(committed)
    pool.seq_lens[:], pool.prompt_lens[:] = len(committed), len(PROMPT)
    request = RequestState("a", 0, PROMPT, SamplingParams(**fields), return_hidden_states=False, seed=0, arrival=0)
    sampling = SamplingBatch.of([request] * rows, rows, VOCAB, (EOS,), torch.device("cpu"))
    window = Window(pool, torch.arange(rows), sampling, coins)
    tokens = torch.tensor(drafts).expand(rows, -1)
    above = torch.tensor(tuple(range(len(drafts))) if parents is None else parents).expand(rows, -1)
    if request.sampling.constrained:
        (matcher,) = Grammars(folder, VOCAB, (EOS,)).matchers(None, request.sampling.regex, 1)
        assert all(matcher.accept(token) for token in OUTPUT)
        permitted, kept = draft_masks([matcher], tokens[:1], above[:1], VOCAB)
        window.permitted = permitted.expand(rows, -1, -1)
        tokens = tokens.masked_fill(~kept, -1)
    if parents is not None:
        window.tree = tree_of(tokens, above, torch.full((rows,), len(committed) - 1))
    return window, tokens


def paths_of(drafts: Tokens, parents: Tokens) -> list[Tokens]:
    paths: list[Tokens] = [()]
    for token, parent in zip(drafts, parents, strict=True):
        paths.append((*paths[parent], max(token, 0)))
    return paths


def emitted_law(
    fields: dict[str, Any],
    drafts: Tokens,
    parents: Tokens | None,
    law: Laws,
    folder: Path,
    drafter: Laws | None = None,
) -> dict[Tokens, float]:
    """Blocks that verification of one tree of drafts comes to, with their masses. `drafter`: the laws that the drafts
    of a chain were drawn from, None for drafts that were chosen."""
    nodes = tuple(range(len(drafts))) if parents is None else parents
    paths = paths_of(drafts, nodes)
    depth = max(map(len, paths)) + 1
    lines: dict[tuple[int, int], set[float]] = {}
    finals: set[float] = set()
    for node, path in enumerate(paths):
        left = list(law(path))
        finals.update(cumulated(left))
        children = [drafts[d] for d, parent in enumerate(nodes) if parent == node and drafts[d] >= 0]
        for order, token in enumerate(children):
            mass = sum(left) * (1.0 if drafter is None else drafter(path)[token])
            lines.setdefault((Stream.SIBLING + order, len(path)), set()).add(left[token] / mass if mass else 0.0)
            drawn = [0.0] * VOCAB if drafter is None else drafter(path)
            left = [max(p - q, 0.0) if i != token else 0.0 for i, (p, q) in enumerate(zip(left, drawn, strict=True))]
            finals.update(cumulated(left))
    keys = [*lines, None]
    sets = [points(lines[key]) if key is not None else points(finals) for key in keys]
    combined = list(itertools.product(*sets))
    columns = {
        key: torch.tensor([row[i][0] for row in combined], dtype=torch.float64)
        for i, key in enumerate(keys)
        if key is not None
    }
    final = torch.tensor([row[-1][0] for row in combined], dtype=torch.float64)
    columns |= {(int(Stream.FINAL), place): final for place in range(depth)}
    weights = torch.tensor([[part[1] for part in row] for row in combined], dtype=torch.float64).prod(1)
    coins = Coins(columns, len(PROMPT + OUTPUT))
    window, tokens = window_of(fields, len(combined), coins, drafts, parents, folder)
    window.pool.draft_probs = None
    if drafter is not None:
        probs = torch.tensor([drafter(path) for path in paths[:-1]])
        window.pool.draft_probs = probs.expand(len(combined), -1, -1)
    logits = torch.tensor([raw_logits(path) for path in paths], dtype=torch.float64).expand(len(combined), -1, -1)
    verdict = verify(logits, tokens, window, depth)
    masses: dict[Tokens, float] = {}
    for row, weight in zip(verdict.emitted.tolist(), weights.tolist(), strict=True):
        block = tuple(token for token in row if token >= 0)
        masses[block] = masses.get(block, 0.0) + weight
    return masses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, VOCAB, EOS)
    return path


def error(fields: dict[str, Any], drafts: Tokens, parents: Tokens | None, folder: Path) -> float:
    fields = {"temperature": 1.0, "max_new_tokens": 12, **fields}
    law = law_under(fields)
    depth = max(map(len, paths_of(drafts, tuple(range(len(drafts))) if parents is None else parents))) + 1
    masses = emitted_law(fields, drafts, parents, law, folder)
    return distance(completed(masses, law, VOCAB, depth), target_law(law, VOCAB, depth))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_in_every_position(name: str, folder: Path) -> None:
    for drafts in CHAINS:
        assert error(OPTIONS[name], drafts, None, folder) < TOLERANCE, drafts
    for drafts, parents in TREES.values():
        assert error(OPTIONS[name], drafts, parents, folder) < TOLERANCE, (drafts, parents)


@pytest.mark.parametrize("name", ["regex", "bad_words", "all"])
def test_drafts_that_were_drawn(name: str, folder: Path) -> None:
    """In sum over the drafter's law, which knows of no option: what masks forbid is drafted too, and must be rejected
    as a draft, or the law behind it is another."""
    fields = {"temperature": 1.0, "max_new_tokens": 12, **OPTIONS[name]}
    law, drafter = law_under(fields), seeded_laws(VOCAB, 8, 3, sparse=False)
    total = dict.fromkeys(sequences(VOCAB, 3), 0.0)
    for drafts in sequences(VOCAB, 2):
        masses = emitted_law(fields, drafts, None, law, folder, drafter)
        for tokens, mass in completed(masses, law, VOCAB, 3).items():
            total[tokens] += chance(drafter, (), drafts) * mass
    assert distance(total, target_law(law, VOCAB, 3)) < TOLERANCE


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_is_forgotten_is_red(name: str, folder: Path) -> None:
    """The same drafts verified without the option: the law is another one."""
    plain = {"temperature": 1.0, "max_new_tokens": 12}
    law = law_under(plain | OPTIONS[name])
    masses = emitted_law(plain, CHAINS[0], None, law_under(plain), folder)
    whole = completed(masses, law_under(plain), VOCAB, 3)
    assert distance(whole, target_law(law, VOCAB, 3)) > 1000 * TOLERANCE
