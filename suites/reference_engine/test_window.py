"""What every row of a verify window follows: its ancestors, their depth, and counts of the tokens before it."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_engine.config import EngineConfig, SpecConfig
from reference_engine.pool import RequestPool
from reference_engine.request import RequestState, SamplingParams
from reference_engine.sampling.processors import SamplingBatch
from reference_engine.sampling.random import CounterRandom
from reference_engine.sampling.sampler import Window
from reference_engine.verification.tree import tree_of
from suites.registration import suite

suite(seconds=0.7, stage="cpu", needs="cpu")

VOCAB, NUM_DRAFTS = 6, 4


@dataclass(frozen=True)
class Row:
    """One request: prompt, output so far, drafts (-1 = none), and the parents of a tree."""

    prompt: list[int]
    output: list[int]
    drafts: list[int]
    parents: list[int]

    def before(self, node: int) -> list[int]:
        """Drafts on the path to a node, itself included."""
        path: list[int] = []
        while node:
            path.append(self.drafts[node - 1])
            node = self.parents[node - 1]
        return path


TOKEN = st.integers(0, VOCAB - 1)


@st.composite
def rows(draw: st.DrawFn, *, tree: bool) -> Row:
    parents = [draw(st.integers(0, node)) for node in range(NUM_DRAFTS)] if tree else list(range(NUM_DRAFTS))
    return Row(
        draw(st.lists(TOKEN, min_size=1, max_size=5)),
        draw(st.lists(TOKEN, max_size=5)),
        [draw(st.one_of(TOKEN, st.just(-1))) for _ in range(NUM_DRAFTS)],
        parents,
    )


def window(batch: list[Row], params: SamplingParams, *, tree: bool) -> Window:
    """A window over requests that were admitted in turn; the pool's rows were somebody else's before."""
    spec = SpecConfig(method="EAGLE", num_steps=NUM_DRAFTS, num_draft_tokens=NUM_DRAFTS + 1)
    config = EngineConfig(model=Path("none"), spec=spec, context_length=16, page_size=4, max_running=len(batch))
    pool = RequestPool(config, VOCAB)
    pool.token_ids.fill_(VOCAB - 1)
    requests = []
    for place, row in enumerate(batch):
        request = RequestState(f"r{place}", 0, tuple(row.prompt), params, False, seed=place, arrival=place)
        request.output_token_ids = list(row.output)
        pool.admit(request)
        requests.append(request)
    index = torch.tensor([request.row for request in requests])
    sampling = SamplingBatch.of(requests, len(batch), VOCAB, (), torch.device("cpu"))
    made = Window(pool, index, sampling, CounterRandom())
    if tree:
        drafts, parents = (torch.tensor([getattr(row, name) for row in batch]) for name in ("drafts", "parents"))
        made.tree = tree_of(drafts, parents, pool.seq_lens[index] - 1)
    return made


def counted(tokens: list[int]) -> list[int]:
    counts = Counter(tokens)
    return [counts[token] for token in range(VOCAB)]


def check_history(batch: list[Row], *, tree: bool) -> None:
    made = window(batch, SamplingParams(presence_penalty=1.0, min_new_tokens=1), tree=tree)
    history = made.history(torch.tensor([row.drafts for row in batch]), VOCAB)
    assert history is not None
    for place, row in enumerate(batch):
        assert history.prompt_counts[place, 0].tolist() == counted(row.prompt)
        for node in range(NUM_DRAFTS + 1):
            before = row.before(node)
            # A draft of -1 is no node of a tree: what follows it is never reached.
            if not tree or -1 not in before:
                assert history.output_counts[place, node].tolist() == counted([*row.output, *before])
                assert int(history.num_output[place, node]) == len(row.output) + len(before)


@settings(max_examples=40)
@given(batch=st.lists(rows(tree=False), min_size=1, max_size=3))
def test_rows_of_a_chain_follow_all_drafts_before_them(batch: list[Row]) -> None:
    check_history(batch, tree=False)


@settings(max_examples=60)
@given(batch=st.lists(rows(tree=True), min_size=1, max_size=3))
def test_rows_of_a_tree_follow_their_own_path(batch: list[Row]) -> None:
    check_history(batch, tree=True)


def test_the_first_token_follows_the_prompt() -> None:
    made = window([Row([1, 1, 2], [], [-1] * 4, [0] * 4)], SamplingParams(frequency_penalty=1.0), tree=False)
    history = made.history(None, VOCAB)
    assert history is not None
    assert history.prompt_counts[0, 0].tolist() == counted([1, 1, 2])
    assert history.output_counts[0, 0].tolist() == [0] * VOCAB
    assert history.num_output.tolist() == [[0]]


def test_nothing_is_counted_when_nothing_looks_back() -> None:
    made = window([Row([1], [2], [3] * 4, [0] * 4)], SamplingParams(), tree=False)
    assert made.history(torch.tensor([[3] * 4]), VOCAB) is None


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 8))
def test_ancestors_and_depths_of_any_tree(seed: int, nodes: int) -> None:
    rng = random.Random(seed)
    batch = [[rng.randint(0, node) for node in range(nodes)] for _ in range(3)]
    roots = torch.tensor([0, 5, 900])
    made = tree_of(torch.zeros(3, nodes, dtype=torch.long), torch.tensor(batch), roots)
    for row, parents in enumerate(batch):
        for node in range(nodes + 1):
            path = [node]
            while path[-1]:
                path.append(parents[path[-1] - 1])
            expected: list[Any] = [other in path for other in range(nodes + 1)]
            assert made.mask[row, node].tolist() == expected
            assert int(made.positions[row, node]) == int(roots[row]) + len(path) - 1
