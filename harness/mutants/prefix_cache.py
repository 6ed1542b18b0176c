"""Prefix cache: reused prefixes whose draft-side state is missing or belongs to another continuation; reuse lost."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

FULL_POOL = (
    "ACCEPT-1",
    "ACCEPT-2",
    "ALIAS-1",
    "ALIAS-2",
    "COUNT-1",
    "COUNT-2",
    "EQUAL-1",
    "EQUAL-2",
    "FINISH-1",
    "FINISH-2",
    "GRAM-1",
    "LAW-1",
    "LAW-3",
    "LOGP-1",
    "SCHED-1",
    "SCHED-2",
    "SCHED-3",
    "SHAPE-1",
    "SHAPE-2",
    "STATE-1",
)
"""What sees that requests are never admitted, or sit in the pages of others."""

MUTANTS = (
    Mutant(
        id="raw-keys-for-paired-rows",
        fault="Pages are found by their own tokens, though the last draft row of each depends on the next one.",
        bugs=("B218", "B219"),
        lanes=("EAGLE3", "EAGLE", "EAGLE-tree"),
        live="two prompts that part right behind a page",
        red=("STATE-1",),
        may=("ACCEPT-1", "ACCEPT-2"),
        edits=(
            Edit(
                "reference_engine.cache.pages",
                "tuple(token_ids[start : start + self.page_size + self.lookahead])",
                "tuple(token_ids[start : start + self.page_size])",
            ),
        ),
    ),
    Mutant(
        id="draft-does-not-reuse-the-prefix",
        fault="The target goes on from a cached prefix; the drafter has no blocks for it and sees another page.",
        bugs=("B221",),
        lanes=("STANDALONE", "EAGLE", "MTP", "DFLASH"),
        live="a prefix hit and a drafter that reads its whole context",
        red=("ACCEPT-2",),
        may=("ACCEPT-1", "EQUAL-2", "LAW-3", "STATE-1"),
        edits=(
            Edit(
                "reference_engine.runner",
                """        padding = [0] * (len(rows) - len(batch.requests))
""",
                """        padding = [0] * (len(rows) - len(batch.requests))
        cached = [request.num_cached for request in batch.requests]
        own = torch.arange(pool.block_table.shape[1], device=self.device) * self.config.page_size
        reused = own < torch.tensor(cached + padding, device=self.device)[:, None]
""",
            ),
            Edit(
                "reference_engine.runner",
                "            block_table=pool.block_table.index_select(0, rows),\n",
                "            block_table=pool.block_table.index_select(0, rows).masked_fill(reused, 0),\n",
            ),
        ),
    ),
    Mutant(
        id="block-drop-in-every-round",
        fault="The last block of a hit is dropped in every round of the search, until nothing is left of it.",
        bugs=("B207", "B208"),
        lanes=("MTP", "EAGLE", "EAGLE3"),
        live="a drafter that looks ahead",
        red=("EQUAL-2",),
        edits=(
            Edit(
                "reference_engine.cache.pages",
                "        for page in pages:\n            self._refs[page] += 1\n",
                """        while self.lookahead and pages:
            pages.pop()
        for page in pages:
            self._refs[page] += 1
""",
            ),
        ),
    ),
    Mutant(
        id="state-of-a-block-before",
        fault="After a prefix hit the recurrent state is one block older than the KV: its tokens are skipped.",
        bugs=("B204", "B206"),
        lanes=("NGRAM", "STANDALONE", "MTP"),
        live="a hybrid target and a prefix hit of two pages or more",
        red=("EQUAL-2",),
        may=("ACCEPT-1", "ALIAS-1", "EQUAL-1", "FINISH-1", "FINISH-2", "LOGP-1", "SCHED-1", "SCHED-3", "STATE-1"),
        edits=(
            Edit(
                "reference_engine.cache.recurrent",
                "places(block_table, (starts - 1).clamp(min=0)[:, None], self.page_size)",
                "places(block_table, (starts - 1 - self.page_size).clamp(min=0)[:, None], self.page_size)",
            ),
        ),
    ),
    Mutant(
        id="no-extracted-rows-for-cached-tokens",
        fault="Extracted states are those of the tokens computed in this run: a cached prefix gives no rows.",
        bugs=("B213",),
        lanes=("EXTRACT",),
        live="a prefix hit",
        red=("ALIAS-1",),
        edits=(
            Edit(
                "reference_engine.engine",
                "        return self.drafter.layer_states(request.pages, num_rows)\n",
                """        states = self.drafter.layer_states(request.pages, num_rows)
        return None if states is None else states[request.num_cached :].clone()
""",
            ),
        ),
    ),
    Mutant(
        id="hits-of-a-refused-request-stay-held",
        fault="A request that does not fit yet keeps its hold on the cached pages found, each time it is tried.",
        bugs=("B211",),
        lanes=("MEDUSA", "none", "EAGLE"),
        live="prefix hits in a pool that is full",
        red=("KV-1",),
        may=FULL_POOL,
        edits=(
            Edit(
                "reference_engine.scheduler",
                "                self.allocator.release(reversed(matched))\n",
                "",
            ),
        ),
    ),
    Mutant(
        id="cached-pages-are-freed-too",
        fault="A page of the prefix cache that is released by its last holder becomes evictable and free at once.",
        bugs=("B335",),
        lanes=("EAGLE-tree", "none", "MTP"),
        live="a prefix cache",
        red=("KV-1",),
        may=FULL_POOL,
        edits=(
            Edit(
                "reference_engine.cache.pages",
                """                    self._evictable[page] = None
                else:
                    freed.append(page)
""",
                """                    self._evictable[page] = None
                freed.append(page)
""",
            ),
        ),
    ),
)
