"""Who owns which page: allocation, the prefix cache over full pages, eviction."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from reference_engine.cache.kv import NULL_PAGE

_Key = tuple[int, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class _CachedPage:
    """A full page in the prefix cache. `key` is (page of the parent, tokens of this page and its lookahead)."""

    page: int
    key: _Key
    children: int = 0


class PageAllocator:
    """Pages 1..num_pages with reference counts, and a prefix cache that keeps unreferenced pages until they are needed.

    A cached page is found by the tokens that its contents depend on. The target's KV depends on the tokens up to the
    page's end; a drafter's row at position p may depend on `lookahead` tokens after p as well (EAGLE: 1), so these are
    part of the key: two prompts that part right after a page must not share its draft KV.
    """

    def __init__(
        self, num_pages: int, page_size: int, lookahead: int, caching: bool, on_free: Callable[[Iterable[int]], None]
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.lookahead = lookahead
        self.caching = caching
        self._on_free = on_free
        self._free = deque(range(1, num_pages + 1))
        self._refs = [0] * (num_pages + 1)
        self._by_key: dict[_Key, _CachedPage] = {}
        self._by_page: dict[int, _CachedPage] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Pages that `allocate` could hand out, evicting what it must."""
        return len(self._free) + len(self._evictable)

    def free_pages(self) -> tuple[int, ...]:
        return tuple(self._free)

    def cached_pages(self) -> tuple[int, ...]:
        """Pages in the prefix cache that nobody holds."""
        return tuple(self._evictable)

    def shared_pages(self) -> tuple[int, ...]:
        return tuple(page for page in self._by_page if self._refs[page] > 1)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None (and nothing changes) when there are not enough."""
        if count > self.num_available:
            return None
        self._evict(count - len(self._free))
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            assert self._refs[page] == 0, f"page {page} was free with {self._refs[page]} references"
            self._refs[page] = 1
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Drop one reference from each page; unreferenced pages are freed, or stay evictable in the prefix cache."""
        freed = []
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is released twice"
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if page in self._by_page:
                    self._evictable[page] = None
                else:
                    freed.append(page)
        self._give_back(freed)

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """The longest chain of cached pages whose keys the tokens cover, with a reference taken on each. At least one
        token is left to compute."""
        pages: list[int] = []
        parent = NULL_PAGE
        while self.caching and (len(pages) + 1) * self.page_size < len(token_ids):
            found = self._by_key.get(self._key(parent, token_ids, len(pages)))
            if found is None:
                break
            parent = found.page
            pages.append(parent)
        for page in pages:
            self._refs[page] += 1
            self._evictable.pop(page, None)
        return pages

    def insert(self, pages: Sequence[int], token_ids: Sequence[int], num_computed: int) -> None:
        """Offer a request's pages to the prefix cache: those whose KV is final given `num_computed` tokens and whose
        key the committed `token_ids` cover. A page whose key is taken already stays private to its request."""
        if not self.caching:
            return
        parent = NULL_PAGE
        for index, page in enumerate(pages):
            end = (index + 1) * self.page_size
            if end + max(self.lookahead - 1, 0) > num_computed or end + self.lookahead > len(token_ids):
                return
            key = self._key(parent, token_ids, index)
            found = self._by_key.get(key)
            if found is None:
                found = self._by_key[key] = self._by_page[page] = _CachedPage(page, key)
                if parent != NULL_PAGE:
                    self._by_page[parent].children += 1
            elif found.page != page:
                # Descendants may only hang below the cached twin, which this request does not hold.
                return
            parent = page

    def reset_cache(self) -> None:
        """Forget every cached page that nobody holds."""
        self._evict(len(self._evictable))

    def _key(self, parent: int, token_ids: Sequence[int], index: int) -> _Key:
        start = index * self.page_size
        return parent, tuple(token_ids[start : start + self.page_size + self.lookahead])

    def _evict(self, count: int) -> None:
        """Free the `count` least recently released cached pages, leaves first."""
        freed: list[int] = []
        while len(freed) < count:
            leaf = next(page for page in self._evictable if self._by_page[page].children == 0)
            del self._evictable[leaf]
            cached = self._by_page.pop(leaf)
            del self._by_key[cached.key]
            if cached.key[0] != NULL_PAGE:
                self._by_page[cached.key[0]].children -= 1
            freed.append(leaf)
        self._give_back(freed)

    def _give_back(self, pages: list[int]) -> None:
        if pages:
            self._on_free(pages)
            self._free.extend(pages)
