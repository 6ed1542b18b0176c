"""Structured output: which tokens a grammar lets follow, at the end of the output and along a tree of drafts.

xgrammar compiles a grammar against the checkpoint's tokenizer and steps through it. It takes its time to import, so
that happens with the first request that has a grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer

from reference_engine.config import require

if TYPE_CHECKING:
    import xgrammar


class Matcher:
    """One grammar behind the tokens accepted so far. An EOS id may come only where the grammar is complete, and ends
    it: nothing may be asked of a matcher afterwards but to roll back."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self._matcher = matcher
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size

    @property
    def ended(self) -> bool:
        return self._matcher.is_terminated()

    def accept(self, token_id: int) -> bool:
        """Step over a token; False, and no step, where the grammar does not let it follow."""
        return not self.ended and self._matcher.accept_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)

    def fill(self, words: torch.Tensor) -> None:
        """Write which ids may follow into int32 words [ceil(V / 32)] on the host, the lowest id in the lowest bit."""
        assert not self.ended, "a grammar that has ended is asked for more"
        # False: every id may follow, and nothing was written.
        if not self._matcher.fill_next_token_bitmask(words[None], 0):
            words.fill_(-1)


class Grammars:
    """Compiles grammars for one checkpoint."""

    def __init__(self, model: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._file = model / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._compiler: xgrammar.GrammarCompiler | None = None

    def matchers(self, json_schema: str | None, regex: str | None, count: int) -> list[Matcher]:
        """`count` matchers before their first token. Raises ValueError that names the field when there is no such
        grammar, or no token of the vocabulary can begin it."""
        import xgrammar

        name, value = ("regex", regex) if json_schema is None else ("json_schema", json_schema)
        assert value is not None
        require(self._file.is_file(), name, value, f"a grammar needs a tokenizer.json beside {self._file.parent}")
        require(bool(self._eos_token_ids), name, value, "a grammar ends with an EOS id, and the target has none")
        if self._compiler is None:
            tokenizer = self._file.read_text(encoding="utf-8")
            self._compiler = _compiler(tokenizer, self._vocab_size, self._eos_token_ids)
        try:
            compiled = (
                self._compiler.compile_json_schema(value)
                if name == "json_schema"
                else self._compiler.compile_regex(value)
            )
        except RuntimeError as error:
            reason = str(error).strip().rpartition("] ")[2]
            raise ValueError(f"{name}={value!r}: xgrammar cannot compile it: {reason}") from error
        eos = frozenset(self._eos_token_ids)
        made = [Matcher(xgrammar.GrammarMatcher(compiled), eos, self._vocab_size) for _ in range(count)]
        words = _words(1, self._vocab_size)
        made[0].fill(words[0])
        require(bool(unpacked(words, self._vocab_size).any()), name, value, "no token of the vocabulary can begin it")
        return made


@lru_cache(maxsize=8)
def _compiler(tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> xgrammar.GrammarCompiler:
    """For the text of a tokenizer.json. A compiler remembers what it has compiled, so engines of one tokenizer share
    it. Special tokens stand for no text, whatever they are called, and so do ids that the tokenizer lacks."""
    import xgrammar

    known = Tokenizer.from_str(tokenizer)
    special = {token_id for token_id, token in known.get_added_tokens_decoder().items() if token.special}
    texts = [""] * vocab_size
    for text, token_id in known.get_vocab().items():
        if token_id < vocab_size and token_id not in special:
            texts[token_id] = text
    kind = xgrammar.VocabType[_spelling(json.loads(tokenizer))]
    info = xgrammar.TokenizerInfo(texts, kind, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids))
    return xgrammar.GrammarCompiler(info)


def _spelling(tokenizer: dict[str, Any]) -> str:
    """How the vocabulary spells bytes, told by the decoder of a tokenizer.json."""
    decoder = tokenizer.get("decoder") or {}
    kinds = {part["type"] for part in decoder.get("decoders", [decoder]) if "type" in part}
    return "BYTE_LEVEL" if "ByteLevel" in kinds else "BYTE_FALLBACK" if "ByteFallback" in kinds else "RAW"


def _words(rows: int, vocab_size: int) -> torch.Tensor:
    """A mask of `rows` rows in which everything is allowed."""
    return torch.full((rows, -(-vocab_size // 32)), -1, dtype=torch.int32)


def unpacked(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int32 words [..., ceil(V / 32)] -> bool [..., V]."""
    bits = (words[..., None] >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    return bits.flatten(-2)[..., :vocab_size].bool()


def next_token_mask(matchers: Sequence[Matcher | None], rows: int, vocab_size: int) -> torch.Tensor:
    """bool [rows, 1, V] on the host: what may follow each row's output; everything where there is no grammar."""
    words = _words(rows, vocab_size)
    for row, matcher in enumerate(matchers):
        if matcher is not None:
            matcher.fill(words[row])
    return unpacked(words, vocab_size)[:, None]


def draft_masks(
    matchers: Sequence[Matcher | None], drafts: torch.Tensor, parents: torch.Tensor, vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """drafts, parents [N, n - 1] (parents as nodes, 0 = root; a draft of -1 is no node) -> what may follow each node,
    bool [N, n, V] on the host, and which drafts are worth verifying, bool [N, n - 1].

    A draft that the grammar forbids stays: it has no probability under the mask of its parent, and rejecting it is what
    keeps the law of a sampled request. What hangs below it, or below an EOS id, can never come up and is dropped.
    """
    rows, num_drafts = drafts.shape
    words = _words(rows * (num_drafts + 1), vocab_size).view(rows, num_drafts + 1, -1)
    kept = torch.ones(rows, num_drafts, dtype=torch.bool)
    lists = zip(matchers, drafts.tolist(), parents.tolist(), strict=False)
    for row, (matcher, tokens, above) in enumerate(lists):
        if matcher is not None:
            kept[row] = torch.tensor(_walk(matcher, tokens, above, words[row]), dtype=torch.bool)
    return unpacked(words, vocab_size), kept


def _walk(matcher: Matcher, drafts: list[int], parents: list[int], words: torch.Tensor) -> list[bool]:
    """Fill the words of every node that can come up, depth first; returns which drafts hang on such a node. The matcher
    ends where it began."""
    children: list[list[int]] = [[] for _ in range(len(drafts) + 1)]
    for draft, parent in enumerate(parents):
        if drafts[draft] >= 0:
            children[parent].append(draft + 1)
    kept = [False] * len(drafts)
    depth = 0
    waiting = [(0, 0)]
    while waiting:
        node, level = waiting.pop()
        if node:
            matcher.rollback(depth - level + 1)
            accepted = matcher.accept(drafts[node - 1])
            assert accepted, f"draft {drafts[node - 1]} is allowed by its mask and not by the grammar"
        depth = level
        matcher.fill(words[node])
        for child in children[node]:
            kept[child - 1] = True
            token_id = drafts[child - 1]
            if token_id in matcher.eos_token_ids:
                words[child] = _only(matcher.eos_token_ids, words.shape[1])
            elif int(words[node, token_id // 32]) >> token_id % 32 & 1:
                waiting.append((child, level + 1))
    matcher.rollback(depth)
    return kept


def _only(token_ids: Iterable[int], num_words: int) -> torch.Tensor:
    """Words in which nothing else is allowed."""
    bits = torch.zeros(num_words * 32, dtype=torch.int64)
    bits[list(token_ids)] = 1
    return (bits.view(num_words, 32) << torch.arange(32)).sum(1).to(torch.int32)
