"""Pages and the prefix cache against a model that knows, token by token, what every page holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reference_engine.cache.pages import PageAllocator
from suites.registration import suite

suite(seconds=1.8, stage="cpu", needs="cpu")

NUM_PAGES, PAGE_SIZE = 8, 2
TRUNKS = ((0, 1, 1, 0, 1, 0, 0, 1, 1, 1), (0, 1, 1, 0, 0, 1, 0, 1, 0, 0))
TOKENS = st.tuples(st.sampled_from(TRUNKS), st.integers(1, 10), st.lists(st.integers(0, 1), max_size=1)).map(
    lambda parts: (*parts[0][: parts[1]], *parts[2])
)
"""Prompts that share their beginnings, some of them whole."""


@dataclass
class Holder:
    """A request: its tokens, its pages, and how many tokens its KV is computed for."""

    tokens: tuple[int, ...]
    pages: list[int]
    computed: int = 0
    offered: set[int] = field(default_factory=set)


class Pages(RuleBasedStateMachine):
    """`contents` is what a page's KV was computed from: all tokens up to its end, and those that drafters look ahead.

    A page matched for other contents would serve foreign KV; a page handed out while somebody holds it would be
    overwritten under its owner.
    """

    lookahead = 0

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.allocator = PageAllocator(NUM_PAGES, PAGE_SIZE, self.lookahead, True, self._on_free)
        self.holders: list[Holder] = []
        self.contents: dict[int, tuple[int, ...]] = {}

    def _on_free(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert not any(page in holder.pages for holder in self.holders), f"page {page} is poisoned while held"
            self.contents.pop(page, None)
            self.freed.append(page)

    def key(self, tokens: tuple[int, ...], index: int) -> tuple[int, ...]:
        return tokens[: (index + 1) * PAGE_SIZE + self.lookahead]

    @rule(tokens=TOKENS, spare=st.integers(1, 2))
    def admit(self, tokens: tuple[int, ...], spare: int) -> None:
        """Match what is cached, allocate the rest, or give the match back where there is not enough."""
        matched = self.allocator.match(tokens)
        assert len(matched) * PAGE_SIZE < len(tokens), "nothing is left to compute"
        for index, page in enumerate(matched):
            assert self.contents[page] == self.key(tokens, index), f"page {page} holds the KV of other tokens"
        held = [page for holder in self.holders for page in holder.pages]
        available = self.allocator.num_available
        wanted = -(-len(tokens) // PAGE_SIZE) + spare - len(matched)
        self.holders.append(Holder(tokens, list(matched), len(matched) * PAGE_SIZE))
        fresh = self.allocator.allocate(wanted)
        assert (fresh is None) == (wanted > available)
        if fresh is None:
            self.holders.pop()
            self.allocator.release(reversed(matched))
            return
        assert len(set(fresh)) == wanted
        assert not set(fresh) & {*held, *matched}, "a page is held twice"
        self.holders[-1].pages += fresh

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        """Compute some more tokens and offer what is final, as after a chunk or a decode step."""
        holder = data.draw(st.sampled_from(self.holders))
        self._compute(holder, data.draw(st.integers(holder.computed, len(holder.tokens))))

    def _compute(self, holder: Holder, computed: int) -> None:
        holder.computed = computed
        for index, page in enumerate(holder.pages):
            if (index + 1) * PAGE_SIZE <= holder.computed:
                self.contents.setdefault(page, self.key(holder.tokens, index))
        self.allocator.insert(holder.pages, holder.tokens, holder.computed)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """In any order: that leaves are evicted first must not depend on it."""
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.allocator.release(data.draw(st.permutations(holder.pages)))

    @rule(tokens=TOKENS, backwards=st.booleans())
    def serve(self, tokens: tuple[int, ...], backwards: bool) -> None:
        """A whole request, if there is room for it."""
        before = len(self.holders)
        self.admit(tokens, 1)
        if len(self.holders) > before:
            holder = self.holders[-1]
            self._compute(holder, len(tokens))
            self.holders.pop()
            self.allocator.release(holder.pages[::-1] if backwards else holder.pages)

    @rule()
    def reset(self) -> None:
        self.allocator.reset_cache()
        assert not self.allocator.cached_pages()

    @invariant()
    def every_page_has_one_state(self) -> None:
        free, cached = self.allocator.free_pages(), self.allocator.cached_pages()
        held = {page for holder in self.holders for page in holder.pages}
        assert sorted([*free, *cached, *held]) == list(range(1, NUM_PAGES + 1))
        assert self.allocator.num_available == len(free) + len(cached)
        times = [page for holder in self.holders for page in set(holder.pages)]
        assert {page for page in times if times.count(page) > 1} == set(self.allocator.shared_pages())

    def teardown(self) -> None:
        """Leaves go first: for every page that is cached so are, or are held, those of its prefix, and a request of its
        tokens finds it."""
        for page in self.allocator.cached_pages():
            matched = self.allocator.match((*self.contents[page], 0))
            self.allocator.release(reversed(matched))
            assert page in matched, f"page {page} is cached, but no request can find it"


class LookaheadPages(Pages):
    lookahead = 1


class FarPages(Pages):
    lookahead = 3


for machine in (Pages, LookaheadPages, FarPages):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)

TestPages = Pages.TestCase
TestLookaheadPages = LookaheadPages.TestCase
TestFarPages = FarPages.TestCase


def allocator(lookahead: int = 0, num_pages: int = 4) -> PageAllocator:
    return PageAllocator(num_pages, PAGE_SIZE, lookahead, True, lambda _pages: None)


@pytest.mark.parametrize(("lookahead", "hits"), [(0, 2), (1, 1)])
def test_prompts_that_part_behind_a_page(lookahead: int, hits: int) -> None:
    """The draft row of a page's last token depends on the token behind the page: another one, another row."""
    pages = allocator(lookahead)
    held = pages.allocate(3)
    assert held is not None
    pages.insert(held, (1, 2, 3, 4, 5), 5)
    assert len(pages.match((1, 2, 3, 4, 6, 7))) == hits


def test_releasing_twice_is_an_error() -> None:
    pages = allocator()
    held = pages.allocate(1)
    assert held is not None
    pages.release(held)
    with pytest.raises(AssertionError, match="released twice"):
        pages.release(held)


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    pages = PageAllocator(4, PAGE_SIZE, 0, False, lambda _pages: None)
    held = pages.allocate(2)
    assert held is not None
    pages.insert(held, (1, 2, 3, 4), 4)
    pages.release(held)
    assert sorted(pages.free_pages()) == [1, 2, 3, 4]
    assert pages.match((1, 2, 3, 4)) == []
