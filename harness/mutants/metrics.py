"""Metrics/accounting: the tokens are right, and what is said about them is not."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

MUTANTS = (
    Mutant(
        id="whole-block-is-billed",
        fault="Usage is advanced by the whole accepted block before it is cut where the request ends.",
        bugs=("B049", "B285", "B286"),
        lanes=("MTP", "STANDALONE", "EAGLE-tree"),
        live="a request that ends inside a block",
        red=("COUNT-1",),
        may=("EQUAL-1", "EQUAL-2", "FINISH-1", "FINISH-2", "SCHED-1", "SCHED-3", "ALIAS-2", "CONF-1", "LAW-3"),
        edits=(
            Edit(
                "reference_engine.request",
                "    num_drafts: int = 0\n",
                "    num_drafts: int = 0\n    num_billed: int = 0\n",
            ),
            Edit(
                "reference_engine.output",
                "            tokens = self._commit(request, emitted[index][: counts[index] - dry])\n",
                """            request.num_billed += counts[index] - dry
            tokens = self._commit(request, emitted[index][: counts[index] - dry])
""",
            ),
            Edit(
                "reference_engine.output",
                "            num_output_tokens=len(request.output_token_ids),\n",
                "            num_output_tokens=request.num_billed,\n",
            ),
        ),
    ),
    Mutant(
        id="logprob-rows-of-the-whole-block",
        fault="Logprob rows come for every accepted token, also for those behind the end of the request.",
        bugs=("B143",),
        lanes=("FROZEN_KV_MTP", "STANDALONE", "EAGLE-tree"),
        live="a request with logprobs that ends inside a block",
        red=("COUNT-1",),
        may=("LOGP-1", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.output",
                "logprobs = result.logprobs.rows(index, len(tokens), request.sampling.logprobs)",
                "logprobs = result.logprobs.rows(index, int(result.counts[index]), request.sampling.logprobs)",
            ),
        ),
    ),
    Mutant(
        id="logprobs-for-whoever-shares-the-batch",
        fault="That somebody in a batch asked for logprobs is kept for the batch, so its neighbours are sent some too.",
        bugs=("B140",),
        lanes=("EAGLE", "none", "MTP"),
        live="a request with logprobs beside one without",
        red=("SCHED-3",),
        edits=(
            Edit(
                "reference_engine.output",
                """        if request.sampling.logprobs is not None and result.logprobs is not None:
            logprobs = result.logprobs.rows(index, len(tokens), request.sampling.logprobs)
""",
                """        if result.logprobs is not None:
            logprobs = result.logprobs.rows(index, len(tokens), request.sampling.logprobs or 0)
""",
            ),
        ),
    ),
    Mutant(
        id="accepted-behind-the-end-is-counted",
        fault="Steps that were on their way when their request ended count as well, with what they accepted.",
        bugs=("B287",),
        lanes=("MEDUSA", "STANDALONE", "EAGLE-tree"),
        live="overlap scheduling, a request that ends by a stop or an abort",
        red=("COUNT-2",),
        may=("CONF-1",),
        edits=(
            Edit(
                "reference_engine.output",
                "            if request.finished:\n                continue\n",
                """            if request.finished:
                if draft_lens is not None:
                    self.stats.count(draft_lens[index], counts[index])
                continue
""",
            ),
        ),
    ),
    Mutant(
        id="accept-flags-are-summed",
        fault="Accepted drafts are counted by their flags, those behind the first rejection included.",
        bugs=("B288",),
        lanes=("EAGLE3", "STANDALONE", "CUSTOM"),
        live="a draft that the target would have chosen behind one that it would not",
        red=("COUNT-2",),
        may=("CONF-1",),
        edits=(
            Edit(
                "reference_engine.batch",
                "    stuck: torch.Tensor | None = None\n",
                "    stuck: torch.Tensor | None = None\n    flags: torch.Tensor | None = None\n",
            ),
            Edit(
                "reference_engine.runner",
                "        result.stuck = verdict.stuck\n",
                """        result.stuck = verdict.stuck
        result.flags = target.draft_tokens == target.logits.argmax(dim=-1)[:, :-1]
""",
            ),
            Edit(
                "reference_engine.output",
                "                self.stats.count(draft_lens[index], counts[index])\n",
                "                self.stats.count(draft_lens[index], 1 + int(result.flags[index].sum()))\n",
            ),
        ),
    ),
    Mutant(
        id="unused-slots-count-as-drafted",
        fault="The drafts of a step are counted by the width of its window, whether a slot holds a draft or not.",
        bugs=("B291",),
        lanes=("NGRAM", "CUSTOM", "EAGLE-tree"),
        live="a request that has fewer drafts than its neighbour, or none",
        red=("COUNT-2",),
        may=("CONF-1",),
        edits=(
            Edit(
                "reference_engine.output",
                "                self.stats.count(draft_lens[index], counts[index])\n",
                "                self.stats.count(result.stride - 1, counts[index])\n",
            ),
        ),
    ),
)
