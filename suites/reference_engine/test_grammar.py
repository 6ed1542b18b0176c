"""Grammars against the language that they stand for, node by node; a matcher is where it was after a walk."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models

from harness.contract import Request
from harness.known_answer.tokenizer import characters, write_tokenizer
from harness.oracles import canonical_grammar, following_ids
from harness.workloads.grammars import SCHEMAS
from reference_engine import EngineConfig, LLMEngine, SamplingParams
from reference_engine.grammar import Grammars, Matcher, draft_masks, next_token_mask, unpacked
from suites.reference_engine.conftest import OpenLane
from suites.reference_engine.support import ask, run
from suites.registration import suite

suite(seconds=0.9, stage="cpu", needs="cpu")

VOCAB, EOS = 64, 2
TEXTS = tuple("" if token == EOS else text for token, text in enumerate(characters(VOCAB, EOS)))
IDS = {text: token for token, text in enumerate(TEXTS) if text}
REGEXES = ("[0-9]+(a|bc)?", "(ab|cd){3}x", ".*", "a{2}(b|c)*d?", '"[^"]*"')


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, VOCAB, EOS)
    return Grammars(folder, VOCAB, (EOS,))


def ids(text: str) -> list[int]:
    return [IDS[char] for char in text]


def allowed(mask: torch.Tensor) -> set[int]:
    return set(mask.nonzero()[:, 0].tolist())


def oracle_ids(fields: dict[str, str], output: Sequence[int]) -> set[int]:
    grammar = canonical_grammar(SamplingParams(**fields))  # type: ignore[arg-type]  # it reads two fields of that name
    assert grammar is not None
    return set(following_ids(grammar.after("".join(TEXTS[token] for token in output)), TEXTS, (EOS,)))


CASES = [{"regex": regex} for regex in REGEXES] + [{"json_schema": schema} for schema in SCHEMAS.values()]


@pytest.mark.parametrize("fields", CASES, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_masks_along_random_texts_are_the_languages(grammars: Grammars, fields: dict[str, str], seed: int) -> None:
    rng = random.Random(seed)
    (matcher,) = grammars.matchers(fields.get("json_schema"), fields.get("regex"), 1)
    output: list[int] = []
    while len(output) < 25:
        right = oracle_ids(fields, output)
        assert allowed(next_token_mask([matcher], 1, VOCAB)[0, 0]) == right, output
        token = rng.choice(sorted(right))
        assert not matcher.accept(rng.choice(sorted(set(range(VOCAB)) - right)) if len(right) < VOCAB else VOCAB)
        assert matcher.accept(token)
        output.append(token)
        if token == EOS:
            break
    assert matcher.ended == (output[-1] == EOS)


TREE_REGEX = "[ab]{2}(c|d)*"


def paths_of(drafts: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    paths: list[list[int]] = [[]]
    for token, parent in zip(drafts, parents, strict=True):
        paths.append([*paths[parent], token])
    return paths


def random_tree(rng: random.Random, committed: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    """Parents before children; tokens that mostly fit, EOS among them, and some that are no node."""
    drafts: list[int] = []
    parents: list[int] = []
    for node in range(size):
        parents.append(rng.randint(max(node - 3, 0), node))
        path = paths_of(drafts, parents[:-1])[parents[-1]]
        fits = oracle_ids({"regex": TREE_REGEX}, [*committed, *path]) if not {-1, EOS} & set(path) else set()
        drafts.append(rng.choice(sorted(fits)) if fits and rng.random() < 0.7 else rng.choice([-1, EOS, *ids("abcdz")]))
    return drafts, parents


@pytest.mark.parametrize("seed", range(30))
def test_every_node_of_a_tree_has_its_own_mask(grammars: Grammars, seed: int) -> None:
    """Two requests with a grammar and one without, behind different texts; the matchers end where they began."""
    rng = random.Random(seed)
    texts = [ids("ab"[: rng.randint(0, 2)]), [], ids("bac"[: rng.randint(0, 3)])]
    matchers: list[Matcher | None] = list(grammars.matchers(None, TREE_REGEX, 3))
    matchers[1] = None
    for matcher, text in zip(matchers, texts, strict=True):
        assert matcher is None or all(matcher.accept(token) for token in text)
    trees = [random_tree(rng, text, 7) for text in texts]
    drafts, parents = (torch.tensor([tree[part] for tree in trees]) for part in (0, 1))
    before = next_token_mask(matchers, 3, VOCAB)
    masks, kept = draft_masks(matchers, drafts, parents, VOCAB)
    assert torch.equal(next_token_mask(matchers, 3, VOCAB), before)
    assert torch.equal(masks[:, :1], before)
    assert masks[1].all()
    assert kept[1].all()
    for row in (0, 2):
        for node, path in enumerate(paths_of(*trees[row])):
            fits = [{EOS, -1}.isdisjoint(path[:depth]) for depth in range(len(path))]
            fits = [
                ok and path[d] in oracle_ids({"regex": TREE_REGEX}, texts[row] + path[:d]) for d, ok in enumerate(fits)
            ]
            if node:
                assert bool(kept[row, node - 1]) == (all(fits[:-1]) and EOS not in path[:-1] and path[-1] >= 0)
            if all(fits):
                right = {EOS} if path[-1:] == [EOS] else oracle_ids({"regex": TREE_REGEX}, texts[row] + path)
                assert allowed(masks[row, node]) == right, path


def test_words_unpack_to_their_bits() -> None:
    words = torch.tensor([[1 << 30 | 5, -(1 << 31) | 2]], dtype=torch.int32)
    assert allowed(unpacked(words, 64)[0]) == {0, 2, 30, 33, 63}
    assert unpacked(words, 40).shape == (1, 40)


def byte_level(folder: Path) -> Grammars:
    """Ids: a, b, " a", " b" (spelled with the letter that stands for a space), an end, a special one whose name is a
    text, one whose bytes are half a character, and one that the tokenizer lacks."""
    vocab = {"a": 0, "b": 1, "\u0120a": 2, "\u0120b": 3, "<end>": 4, "ab": 5, "\u00c3": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True), AddedToken("ab", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return Grammars(folder, 8, (4,))


def test_bytes_and_special_tokens(tmp_path: Path) -> None:
    grammars = byte_level(tmp_path)
    (matcher,) = grammars.matchers(None, "(a| b)+", 1)
    assert allowed(next_token_mask([matcher], 1, 8)[0, 0]) == {0, 3}
    (matcher,) = grammars.matchers(None, ".*", 1)
    assert allowed(next_token_mask([matcher], 1, 8)[0, 0]) == {0, 1, 2, 3, 4, 6}, "a special token says nothing"
    (matcher,) = grammars.matchers(None, "\u00e9|a", 1)
    assert allowed(next_token_mask([matcher], 1, 8)[0, 0]) == {0, 6}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"regex": "[a-"}, "regex='\\[a-'"),
        ({"regex": "(?=a)b"}, "Lookahead"),
        ({"regex": "~"}, "can begin it"),
        ({"json_schema": "{"}, "json_schema='{'"),
        ({"json_schema": '{"type": "date"}'}, "date"),
    ],
)
def test_bad_grammars_are_named(grammars: Grammars, fields: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        grammars.matchers(fields.get("json_schema"), fields.get("regex"), 1)


def test_what_a_grammar_needs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"regex='a': .*tokenizer\.json"):
        Grammars(tmp_path, VOCAB, (EOS,)).matchers(None, "a", 1)
    write_tokenizer(tmp_path, VOCAB, EOS)
    with pytest.raises(ValueError, match="EOS"):
        Grammars(tmp_path, VOCAB, ()).matchers(None, "a", 1)
    for fields in ({"regex": "a", "json_schema": "{}"}, {"regex": "a", "ignore_eos": True}):
        with pytest.raises(ValueError, match="regex"):
            SamplingParams(**fields)  # type: ignore[arg-type]


def test_committed_tokens_go_through_the_grammar(open_lane: OpenLane) -> None:
    """A request that continues is what it would have been; tokens that do not fit are refused."""
    setup = open_lane("STANDALONE").setup()
    params = SamplingParams(regex="[0-9]{3}(ab)+c", max_new_tokens=12)
    whole = finished(setup.target, params, ())
    for cut in (1, 4, 7):
        assert whole[:cut] + finished(setup.target, params, whole[:cut]) == whole
    engine = LLMEngine(EngineConfig(model=setup.target))
    with pytest.raises(ValueError, match="committed_token_ids"):
        engine.add_request("a", (3, 4), params, committed_token_ids=ids("0z"))
    assert not engine.has_unfinished


def finished(model: Path, params: SamplingParams, committed: Sequence[int]) -> tuple[int, ...]:
    engine = LLMEngine(EngineConfig(model=model))
    engine.add_request("a", (3, 4), params, committed_token_ids=committed)
    tokens: tuple[int, ...] = ()
    while engine.has_unfinished:
        tokens += tuple(token for output in engine.step().outputs for token in output.token_ids)
    return tokens


DRY: dict[str, dict[str, Any]] = {
    "at once": {"regex": "a", "bad_words": ((IDS["a"],),)},
    "soon": {"regex": "a~"},
    "before the minimum": {"regex": "ab", "min_new_tokens": 4},
    "allowed and bad": {"allowed_token_ids": (3,), "bad_words": ((3, 3, 3),)},
    "all banned": {"logit_bias": tuple((token, -float("inf")) for token in range(VOCAB))},
}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["none", "STANDALONE", "EAGLE-tree"])
def test_where_nothing_is_left_the_request_ends(open_lane: OpenLane, name: str, overlap: bool) -> None:
    """As aborted, greedy and sampled, with what it had; id 0, which samplers give for want of another, comes nowhere.
    A neighbour goes on, and everything is given back."""
    requests = [
        Request(
            request_id=f"{case}/{temperature}",
            prompt_token_ids=(5, 6, 7),
            sampling=ask(temperature=temperature, seed=1, logprobs=1, max_new_tokens=9, **fields).sampling,
            return_hidden_states=True,
        )
        for case, fields in DRY.items()
        for temperature in (0.0, 1.0)
    ]
    observed = run(open_lane(name).setup(overlap=overlap, max_running=16), [*requests, ask("fine", max_new_tokens=9)])
    says = {"at once": "", "soon": "a", "before the minimum": "ab", "allowed and bad": TEXTS[3] * 2, "all banned": ""}
    for request in requests:
        done = observed.of(request.request_id)
        text = says[request.request_id.partition("/")[0]]
        assert (done.text, done.finish_reason) == (text, "abort"), request.request_id
        assert len(done.token_ids) == len(text) == done.usage.completion_tokens
        assert done.logprobs is not None
        assert len(done.logprobs) == len(text)
        assert (done.hidden_states is not None) == bool(text)
    assert observed.of("fine").finish_reason == "length"
    pages = observed.steps[-1].pages
    assert pages is not None
    assert pages.held == {}


@pytest.mark.parametrize(("fields", "launches"), [({}, 5), ({"regex": ".*"}, 4)])
def test_only_grammars_wait_for_results(open_lane: OpenLane, fields: dict[str, Any], launches: int) -> None:
    """Overlap scheduling launches a step before the end of the request is seen, but not where a mask depends on it."""
    lane = open_lane("none")
    stop = lane.target().greedy((3, 4, 5), 4)[-1]
    observed = run(lane.setup(overlap=True), [ask(max_new_tokens=9, stop_token_ids=(stop,), **fields)])
    assert len(observed.of("a").token_ids) == 4
    assert sum(step.target_forwards for step in observed.steps) == launches
