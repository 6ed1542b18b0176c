"""Concurrency/overlap race: what one step reads is written by another, too early or too late."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

MUTANTS = (
    Mutant(
        id="positions-copied-before-they-are-written",
        fault="The positions of a draft tree are planned from lengths copied before the last step was committed.",
        bugs=("B187",),
        lanes=("EAGLE-tree",),
        live="overlap scheduling, draft trees",
        red=("EQUAL-2",),
        may=("LAW-3", "EQUAL-1", "ALIAS-1", "STATE-1", "LOGP-1", "ACCEPT-1", "ACCEPT-2", "SCHED-1", "SCHED-3"),
        edits=(
            Edit(
                "reference_engine.runner",
                "            window.tree = tree_of(window.drafts, parents, pool.seq_lens[rows] - 1, self.backend)\n",
                """            planned = getattr(self, "_planned_lens", None) if self.config.overlap else None
            planned = pool.seq_lens if planned is None else planned
            window.tree = tree_of(window.drafts, parents, planned[rows] - 1, self.backend)
""",
            ),
            Edit(
                "reference_engine.runner",
                "        pool.commit(rows[:size], verdict.emitted[:size], verdict.accept_lens[:size])\n",
                """        self._planned_lens = pool.seq_lens.clone()
        pool.commit(rows[:size], verdict.emitted[:size], verdict.accept_lens[:size])
""",
            ),
        ),
    ),
    Mutant(
        id="index-mapping-is-overwritten",
        fault="Where in a launch the results of a request lie is told by a mapping that the next schedule overwrites.",
        bugs=("B188",),
        lanes=("MEDUSA", "none", "STANDALONE"),
        live="overlap scheduling, a batch that a request leaves",
        red=("EQUAL-2",),
        may=(
            "LAW-3",
            "EQUAL-1",
            "SCHED-1",
            "SCHED-2",
            "SCHED-3",
            "ALIAS-1",
            "FINISH-1",
            "ACCEPT-1",
            "COUNT-2",
            "STATE-1",
        ),
        edits=(
            Edit(
                "reference_engine.request",
                "    num_drafts: int = 0\n",
                "    num_drafts: int = 0\n    place: int = 0\n",
            ),
            Edit(
                "reference_engine.engine",
                "            request.pending += 1\n",
                "            request.pending += 1\n            request.place = index\n",
            ),
            Edit(
                "reference_engine.output",
                "            request.pending -= 1\n",
                """            if batch.kind == "decode":
                index = request.place
            request.pending -= 1
""",
            ),
        ),
    ),
    Mutant(
        id="accepted-rows-in-a-reused-buffer",
        fault="Which rows were accepted is told in a host buffer that the next launch writes before it is read.",
        bugs=("B197",),
        lanes=("EAGLE", "STANDALONE", "EAGLE-tree"),
        live="overlap scheduling, hidden states",
        red=("ALIAS-1",),
        may=("EQUAL-1", "EQUAL-2", "SCHED-1", "SCHED-3", "FINISH-1"),
        edits=(
            Edit(
                "reference_engine.runner",
                "        result.accept_index, result.draft_tokens = verdict.accept_index, target.draft_tokens\n",
                """        if not hasattr(self, "_host_paths"):
            self._host_paths = pool.token_ids.new_full((self.config.padded_batch(self.config.max_running), 64), -1)
        paths = self._host_paths[: len(rows), : verdict.accept_index.shape[1]]
        paths.copy_(verdict.accept_index)
        result.accept_index, result.draft_tokens = paths, target.draft_tokens
""",
            ),
        ),
    ),
    Mutant(
        id="known-token-read-too-soon",
        fault="The prompt token behind a chunk is read before its copy has arrived: the drafter is fed 0 there.",
        bugs=("B198",),
        lanes=("EAGLE-tree", "EAGLE", "EAGLE3"),
        live="a prefill of several chunks",
        red=("STATE-1",),
        may=("ACCEPT-1", "ACCEPT-2", "EQUAL-2", "LAW-3", "SCHED-1", "SCHED-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.runner",
                "        pool.commit(rows[:size], sampled[:size], counts[:size])\n",
                "        backup = torch.zeros_like(backup)\n"
                "        pool.commit(rows[:size], sampled[:size], counts[:size])\n",
            ),
        ),
    ),
    Mutant(
        id="dropped-rows-are-not-counted",
        fault="The rows of requests that have ended are passed over without being counted: those behind move up.",
        bugs=("B141",),
        lanes=("CUSTOM", "none", "STANDALONE"),
        live="overlap scheduling, a request that ends by a stop or an abort before another in the batch",
        red=("SCHED-1",),
        may=(
            "LAW-3",
            "EQUAL-1",
            "EQUAL-2",
            "SCHED-2",
            "SCHED-3",
            "ALIAS-1",
            "FINISH-1",
            "FINISH-2",
            "COUNT-2",
            "ACCEPT-1",
            "LOGP-1",
        ),
        edits=(
            Edit(
                "reference_engine.output",
                "        outputs = []\n        for index, request in enumerate(batch.requests):\n",
                "        outputs, dropped = [], 0\n        for index, request in enumerate(batch.requests):\n",
            ),
            Edit(
                "reference_engine.output",
                "            if request.finished:\n                continue\n",
                """            if request.finished:
                dropped += batch.kind == "decode"
                continue
            index -= dropped
""",
            ),
        ),
    ),
)
