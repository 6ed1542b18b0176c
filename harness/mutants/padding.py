"""CUDA-graph padding: padded rows, and what is kept from one launch to the next because shapes are fixed."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

FOREIGN_KV = (
    "ACCEPT-1",
    "ACCEPT-2",
    "ALIAS-1",
    "EQUAL-1",
    "FINISH-1",
    "FINISH-2",
    "LAW-1",
    "LAW-3",
    "LOGP-1",
    "SCHED-1",
    "SCHED-3",
    "STATE-1",
)
"""What sees that a request reads KV that is not its own."""

MUTANTS = (
    Mutant(
        id="padded-rows-reach-the-last-page",
        fault="Padded rows count as one token long; their block id -1 wraps around, so they write to the last page.",
        bugs=("B227",),
        lanes=("EAGLE", "MTP", "none"),
        live="padded batches, and a pool so full that its last page is somebody's",
        red=("EQUAL-2",),
        may=FOREIGN_KV,
        edits=(
            Edit(
                "reference_engine.pool",
                "        self.draft_tokens = torch.full((rows, num_drafts)",
                """        self.block_table[self.pad_row] = config.total_pages
        self.draft_tokens = torch.full((rows, num_drafts)""",
            ),
        ),
    ),
    Mutant(
        id="rows-of-the-last-launch-kept",
        fault="The rows of a batch are prepared once for its requests, and not again when they have come into others.",
        bugs=("B229",),
        lanes=("FROZEN_KV_MTP", "none", "MTP"),
        live="requests that are preempted together and come back to one another's rows",
        red=("EQUAL-2",),
        may=FOREIGN_KV,
        edits=(
            Edit(
                "reference_engine.runner",
                "columns is None or columns.requests != batch.requests or columns.host_rows != rows",
                "columns is None or columns.requests != batch.requests",
            ),
        ),
    ),
    Mutant(
        id="window-as-wide-as-the-bucket",
        fault="The capacity of a padded batch in requests is taken for that of a window in tokens: drafts are cut off.",
        bugs=("B222",),
        lanes=("MTP", "STANDALONE", "EAGLE"),
        live="a bucket that is smaller than a verify window",
        red=("ACCEPT-2",),
        may=("ACCEPT-1", "EQUAL-2", "LAW-3"),
        edits=(
            Edit(
                "reference_engine.runner",
                "        return 1 + max(request.num_drafts for request in batch.requests)\n",
                """        width = 1 + max(request.num_drafts for request in batch.requests)
        return min(width, self.config.padded_batch(len(batch.requests))) if self.config.batch_buckets else width
""",
            ),
        ),
    ),
    Mutant(
        id="context-of-the-first-request",
        fault="A padded verify pass sees as many pages as its first request has: longer ones lose context.",
        bugs=("B232",),
        lanes=("DFLASH", "STANDALONE", "EAGLE"),
        live="padded batches of requests of different lengths",
        red=("EQUAL-2",),
        may=FOREIGN_KV,
        edits=(
            Edit(
                "reference_engine.runner",
                "pages_for(max(r.max_num_tokens for r in batch.requests) - 1 + width, self.config.page_size)",
                """pages_for(
            max(r.max_num_tokens for r in batch.requests[: 1 if self.config.batch_buckets and width > 1 else None])
            - 1
            + width,
            self.config.page_size,
        )""",
            ),
        ),
    ),
    Mutant(
        id="draft-context-of-the-first-request",
        fault="In a padded batch the draft pass sees as many pages as its first request has.",
        bugs=("B235",),
        lanes=("STANDALONE", "EAGLE", "MTP"),
        live="padded batches of requests of different lengths, and a drafter that reads its whole context",
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "EQUAL-2", "LAW-3", "STATE-1"),
        edits=(
            Edit(
                "reference_engine.runner",
                "            max_seq_len=max(request.max_num_tokens for request in batch.requests),\n",
                """            max_seq_len=max(
                request.max_num_tokens for request in batch.requests[: 1 if self.config.batch_buckets else None]
            ),
""",
            ),
        ),
    ),
)
