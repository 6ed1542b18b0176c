"""Logprob bookkeeping: tokens are right, the reported log probabilities are missing, shifted or modified."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

RAISES = (
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
    "KV-1",
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
"""Invariants with a test in which somebody wants logprobs: all of them raise."""

MUTANTS = (
    Mutant(
        id="penalties-in-raw-logits",
        fault="Penalties are applied in place on the logits that raw logprobs are taken from later.",
        bugs=("B138", "B114"),
        lanes=("EAGLE3", "none", "NGRAM"),
        live="a penalty and logprobs in one request",
        red=("LOGP-1",),
        edits=(
            Edit(
                "reference_engine.sampling.processors",
                "logits = apply_penalties(logits, *counts, *columns, backend=batch.backend)",
                "logits = logits.copy_(apply_penalties(logits, *counts, *columns, backend=batch.backend))",
            ),
        ),
    ),
    Mutant(
        id="grammar-mask-in-raw-logits",
        fault="What a grammar forbids is masked in place, without a clone: raw logprobs are those of the masked law.",
        bugs=("B139",),
        lanes=("STANDALONE", "none", "EAGLE-tree"),
        live="a grammar and logprobs in one request, and no other processor in the batch",
        red=("LOGP-1",),
        may=("EQUAL-2", "SCHED-3"),
        edits=(
            Edit(
                "reference_engine.sampling.processors",
                'logits.masked_fill(~permitted, float("-inf"))',
                'logits.masked_fill_(~permitted, float("-inf"))',
            ),
        ),
    ),
    Mutant(
        id="logprob-0-under-speculation",
        fault="With a drafter every token is reported with log probability 0: that of the choice, not of the law.",
        bugs=("B136",),
        lanes=("MTP", "STANDALONE", "EAGLE-tree"),
        live="logprobs",
        red=("LOGP-1",),
        may=("ALIAS-1", "EQUAL-1", "EQUAL-2", "SCHED-1", "SCHED-3"),
        edits=(
            Edit(
                "reference_engine.runner",
                "result.logprobs = self._logprobs(batch, target.logits, verdict.emitted)",
                """chosen = verdict.emitted.clamp(min=0)[:, :, None]
        sure = torch.full_like(target.logits, float("-inf")).scatter_(2, chosen, 0.0)
        result.logprobs = self._logprobs(batch, sure if width > 1 else target.logits, verdict.emitted)""",
            ),
        ),
    ),
    Mutant(
        id="unfinished-chunks-not-counted",
        fault="Logprob rows are counted without prefill rows that sample nothing; behind those they are a neighbour's.",
        bugs=("B141",),
        lanes=("DFLASH", "none", "NGRAM"),
        live="a request that is resumed and one that is given its first token, in one prefill pass",
        red=("LOGP-1",),
        may=("LAW-3", "ALIAS-1", "EQUAL-1", "EQUAL-2", "SCHED-1", "SCHED-3"),
        edits=(
            Edit(
                "reference_engine.output",
                "logprobs = result.logprobs.rows(index, len(tokens), request.sampling.logprobs)",
                """row = sum(result.batch.samples[:index]) if path is None else index
            logprobs = result.logprobs.rows(row, len(tokens), request.sampling.logprobs)""",
            ),
        ),
    ),
    Mutant(
        id="no-logprobs-for-count-0",
        fault="Where no request of a batch wants more than the sampled token's logprob (n = 0), none are computed.",
        bugs=("B142",),
        lanes=("EAGLE3", "none", "NGRAM"),
        live="logprobs=0",
        red=("COUNT-1", "LOGP-1"),
        may=("LAW-3", "EQUAL-2", "SCHED-1", "SCHED-3"),
        edits=(
            Edit(
                "reference_engine.runner",
                "return compute_logprobs(logits, emitted, max(wanted), self.backend) if wanted else None",
                "return compute_logprobs(logits, emitted, max(wanted), self.backend) if any(wanted) else None",
            ),
        ),
    ),
    Mutant(
        id="tree-logprobs-by-column",
        fault="Logprob rows of a tree are read by their place in the block, token rows by the accepted path.",
        bugs=("B137",),
        lanes=("EAGLE-tree",),
        live="logprobs, and an accepted path that is not the first nodes of the tree",
        red=("LOGP-1",),
        may=("ALIAS-1", "EQUAL-1", "EQUAL-2", "SCHED-1", "SCHED-3"),
        edits=(
            Edit(
                "reference_engine.decode_pass",
                "hidden, logits = _take_rows(self.hidden, path), _take_rows(self.logits, path)",
                "hidden, logits = _take_rows(self.hidden, path), self.logits[:, : path.shape[1]]",
            ),
        ),
    ),
    Mutant(
        id="logprob-flag-in-the-draft-pass",
        fault="The draft pass sees that a request wants logprobs and cuts its input to one row: shapes do not fit.",
        bugs=("B134",),
        lanes=("EAGLE", "EAGLE3"),
        live="logprobs",
        red=("CONF-1",),
        may=RAISES,
        edits=(
            Edit(
                "reference_engine.runner",
                "            hidden=hidden,\n",
                "            hidden=hidden[:, -1:] if self._logprobs_wanted(batch) else hidden,\n",
            ),
            Edit(
                "reference_engine.runner",
                "    def _logprobs(self, batch: Batch,",
                """    def _logprobs_wanted(self, batch: Batch) -> bool:
        return any(request.sampling.logprobs is not None for request in batch.requests)

    def _logprobs(self, batch: Batch,""",
            ),
        ),
    ),
)
