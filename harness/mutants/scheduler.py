"""Scheduler/preemption/abort: who runs when, and what is left of those who were sent away."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

EVERYBODY = (
    *("ACCEPT-1", "ACCEPT-2", "ALIAS-1", "ALIAS-2", "CONF-1", "COUNT-1", "COUNT-2", "EQUAL-1", "EQUAL-2", "FINISH-1"),
    *("FINISH-2", "GRAM-1", "KV-1", "LAW-1", "LAW-2", "LAW-3", "LOGP-1", "SCHED-1", "SCHED-2", "SCHED-3", "SHAPE-1"),
    *("SHAPE-2", "STATE-1", "STATE-2"),
)
"""Whoever misses the answers of a run that hangs or ends with an error."""

MUTANTS = (
    Mutant(
        id="drafts-survive-preemption",
        fault="Drafts from before a preemption stay on the request, and its prefill runs over them when it resumes.",
        bugs=("B179", "B175"),
        lanes=("EAGLE", "EAGLE3", "STANDALONE", "MTP", "NGRAM"),
        live="a preemption",
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "EQUAL-2", "STATE-1", "LAW-3", "SCHED-1", "SCHED-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.request",
                "    num_drafts: int = 0\n",
                "    num_drafts: int = 0\n    drafts: tuple[int, ...] = ()\n",
            ),
            Edit(
                "reference_engine.request",
                "self.prefill_end = self.num_tokens - 1 if self.output_token_ids else len(self.prompt_token_ids)",
                "self.prefill_end = len(self.prompt_token_ids)\n"
                "        if self.output_token_ids:\n"
                "            self.prefill_end = self.num_tokens - 1 + len(self.drafts)",
            ),
            Edit(
                "reference_engine.scheduler",
                "        self._release(request)\n        request.status = Status.WAITING\n",
                """        drafts = self.pool.draft_tokens[request.row, : request.num_drafts]
        request.drafts = tuple(drafts[drafts >= 0].tolist())
        self._release(request)
        request.status = Status.WAITING
""",
            ),
            Edit(
                "reference_engine.pool",
                "        self.token_ids[row, : len(tokens)] = tokens\n",
                """        self.token_ids[row, : len(tokens)] = tokens
        stale = torch.tensor(request.drafts, dtype=torch.long, device=tokens.device)
        self.token_ids[row, len(tokens) : len(tokens) + len(stale)] = stale
""",
            ),
        ),
    ),
    Mutant(
        id="a-request-left-out-loses-its-drafts",
        fault="A request that is left out of a step, while others prefill, comes back without its drafts.",
        bugs=("B180",),
        lanes=("FROZEN_KV_MTP", "MTP", "EAGLE-tree"),
        live="a prefill while others decode",
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "EQUAL-2", "LAW-3", "SCHED-1", "SCHED-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.runner",
                """        if width < pool.draft_tokens.shape[1]:
            pool.draft_tokens[rows[:size]] = PLACEHOLDER
""",
                "        pool.draft_tokens[:] = PLACEHOLDER\n",
            ),
        ),
    ),
    Mutant(
        id="a-field-is-not-filtered",
        fault="When the members of a batch change, one of its per-request fields (the logit bias) stays as it was.",
        bugs=("B185",),
        lanes=("MEDUSA", "none", "EAGLE"),
        live="a batch that changes and keeps its padded size, and a request with a logit bias",
        red=("SCHED-3",),
        may=("SCHED-1", "EQUAL-1", "EQUAL-2", "FINISH-1", "FINISH-2", "LAW-1", "LAW-3"),
        edits=(
            Edit(
                "reference_engine.runner",
                "            padded = torch.tensor(rows + [self.pool.pad_row]",
                """            if columns is not None and len(columns.rows) == size:
                sampling.bias = columns.sampling.bias
            padded = torch.tensor(rows + [self.pool.pad_row]""",
            ),
        ),
    ),
    Mutant(
        id="drafter-state-of-the-last-tenant",
        fault="What a drafter keeps by pool row is not reset when a request begins behind a cached prefix.",
        bugs=("B177",),
        lanes=("MTP",),
        live="a prefix hit in a row that was used before, and several MTP layers",
        red=("STATE-1",),
        may=("ACCEPT-1", "ACCEPT-2"),
        edits=(
            Edit(
                "reference_engine.drafters.mtp",
                "valid = (positions >= inputs.computed_from[:, None]) & (offsets",
                "valid = (positions >= 0) & (offsets",
            ),
        ),
    ),
    Mutant(
        id="no-retraction",
        fault="A request that finds no pages for its verify window waits for some, also when everybody waits.",
        bugs=("B162", "B174"),
        lanes=("STANDALONE", "none", "EAGLE"),
        live="a pool too small for the requests that run",
        red=("SCHED-2",),
        may=EVERYBODY,
        edits=(
            Edit(
                "reference_engine.scheduler",
                """            while request.status is Status.RUNNING and not self._grow(request):
                drain()
                if request.finished or self._grow(request):
                    break
                victim = max(self._preemptable(), key=lambda candidate: candidate.arrival)
                self.preempt(victim)
                preempted.append(victim.owner)
            scheduled.append(request)
""",
                """            if self._grow(request):
                scheduled.append(request)
""",
            ),
        ),
    ),
    Mutant(
        id="an-ended-request-is-launched-again",
        fault="A request that ended while a launch of it was on its way is launched again and again, and never leaves.",
        bugs=("B342",),
        lanes=("NGRAM", "EAGLE", "none"),
        live="overlap scheduling, a request that ends by a stop or an abort",
        red=("SCHED-2",),
        may=EVERYBODY,
        edits=(
            Edit(
                "reference_engine.scheduler",
                "if not request.prefilling and not request.finished and sure <",
                "if not request.prefilling and sure <",
            ),
            Edit(
                "reference_engine.scheduler",
                "[r for r in scheduled if r.status is Status.RUNNING]",
                "[r for r in scheduled if r.status is not Status.WAITING]",
            ),
        ),
    ),
    Mutant(
        id="a-cancelled-prefill-is-cached",
        fault="Pages of a prompt whose prefill was cancelled go to the prefix cache, computed or not.",
        bugs=("B163",),
        lanes=("EAGLE3", "none", "MTP"),
        live="an abort in the middle of a prefill, then a request with the same prefix",
        red=("SCHED-1",),
        may=(
            "LAW-1",
            "LAW-3",
        ),
        edits=(
            Edit(
                "reference_engine.scheduler",
                "self.allocator.insert(request.pages, request.token_ids, request.num_final)",
                "final = max(request.num_final, request.num_tokens - 1)\n"
                "        self.allocator.insert(request.pages, request.token_ids, final)",
            ),
        ),
    ),
)
