"""Memory leak: pages, rows and slots that nobody gives back, or too soon; memory that is not filled again."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant
from harness.mutants.scheduler import EVERYBODY

MUTANTS = (
    Mutant(
        id="pages-of-decode-steps-are-never-freed",
        fault="The allocated length of a request is that of its prefill: pages that decode steps added stay behind.",
        bugs=("B326", "B327"),
        lanes=("EAGLE3", "EAGLE", "none"),
        live="a request that grows by a page",
        red=("KV-1",),
        may=EVERYBODY,
        edits=(
            Edit(
                "reference_engine.scheduler",
                "        self.allocator.release(reversed(request.pages))\n",
                """        length = len(request.prompt_token_ids) + self.config.reserved_slots
        self.allocator.release(reversed(request.pages[: pages_for(length, self.config.page_size)]))
""",
            ),
        ),
    ),
    Mutant(
        id="a-hit-page-stays-evictable",
        fault="A cached page that a request takes up stays on the list of those that may be evicted.",
        bugs=("B335",),
        lanes=("STANDALONE", "none", "MTP"),
        live="a prefix hit",
        red=("KV-1",),
        may=EVERYBODY,
        edits=(
            Edit(
                "reference_engine.cache.pages",
                "            self._refs[page] += 1\n            self._evictable.pop(page, None)\n",
                "            self._refs[page] += 1\n",
            ),
        ),
    ),
    Mutant(
        id="a-cancelled-prefill-keeps-its-pages",
        fault="The scheduler is not told of the end of a request that is aborted in its prefill: its pages stay held.",
        bugs=("B331",),
        lanes=("EXTRACT", "none", "DFLASH"),
        live="an abort in a prefill of several chunks",
        red=("KV-1",),
        may=EVERYBODY,
        edits=(
            Edit(
                "reference_engine.scheduler",
                "        elif request.row >= 0:\n",
                "        elif request.row >= 0 and not request.prefilling:\n",
            ),
        ),
    ),
    Mutant(
        id="rows-of-cancelled-prefills-are-lost",
        fault="A request that leaves in the middle of its prefill does not give its pool row back.",
        bugs=("B331",),
        lanes=("MTP", "none", "NGRAM"),
        live="as many aborts in a prefill as there are rows",
        red=("SCHED-2",),
        edits=(
            Edit(
                "reference_engine.scheduler",
                "        self.pool.release(request)\n",
                """        if request.prefilling:
            request.row = -1
        else:
            self.pool.release(request)
""",
            ),
        ),
    ),
    Mutant(
        id="kept-rows-hold-whole-pages",
        fault="The layer states of a request are a view, which keeps the rows of all its pages in memory.",
        bugs=("B332",),
        lanes=("EXTRACT",),
        live="a request whose tokens do not fill its last page",
        red=("ALIAS-2",),
        may=("CONF-1",),
        edits=(
            Edit(
                "reference_engine.cache.rows",
                "self.rows[held].flatten(0, 1)[:count].clone()",
                "self.rows[held].flatten(0, 1)[:count]",
            ),
        ),
    ),
)
