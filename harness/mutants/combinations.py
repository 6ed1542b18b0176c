"""Two features at once: each is right by itself, and what one does for the other is forgotten."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

MUTANTS = (
    Mutant(
        id="penalties-pass-over-the-cached-prefix",
        fault="The repetition penalty counts the prompt tokens that were computed, so not those of a prefix hit.",
        bugs=("B112", "B113"),
        lanes=("EAGLE", "none", "MTP"),
        live="a repetition penalty and a prefix hit",
        red=("EQUAL-2",),
        may=("LAW-1", "LAW-3", "SCHED-1", "SCHED-3", "EQUAL-1"),
        edits=(
            Edit(
                "reference_engine.pool",
                "        self.recurrent = recurrent\n",
                "        self.recurrent = recurrent\n"
                "        self.cached = torch.zeros(rows, dtype=torch.long, device=device)\n",
            ),
            Edit(
                "reference_engine.pool",
                "        self.block_table[row] = 0\n        self.draft",
                "        self.block_table[row] = 0\n        self.cached[row] = request.num_cached\n        self.draft",
            ),
            Edit(
                "reference_engine.sampling.sampler",
                "& ~in_prompt\n",
                "& ~in_prompt\n        in_prompt &= column >= pool.cached[rows][:, None]\n",
            ),
        ),
    ),
    Mutant(
        id="resumed-output-counts-as-prompt",
        fault="All that a resumed request has is its prompt: penalties, bad words and min_new_tokens begin anew.",
        bugs=("B191",),
        lanes=("STANDALONE", "none", "EAGLE"),
        live="a preemption of a request with penalties",
        red=("EQUAL-2",),
        may=("LAW-1", "LAW-3", "SCHED-1", "SCHED-3", "EQUAL-1", "FINISH-2", "GRAM-1"),
        edits=(
            Edit(
                "reference_engine.pool",
                "self.prompt_lens[row] = len(request.prompt_token_ids)",
                "self.prompt_lens[row] = len(tokens)",
            ),
        ),
    ),
    Mutant(
        id="bad-words-run-through-a-tree-as-a-chain",
        fault="What stands before a node of a draft tree is taken from the node before it in the window.",
        bugs=("B118",),
        lanes=("EAGLE-tree",),
        live="a bad word of three tokens or more",
        red=("EQUAL-1",),
        may=("LAW-1", "EQUAL-2", "SCHED-3"),
        edits=(
            Edit(
                "reference_engine.sampling.bad_words",
                "parent = draft if tree is None else tree.parents[:, draft].clamp(min=0)",
                "parent = draft",
            ),
        ),
    ),
    Mutant(
        id="greedy-requests-draft-hot",
        fault="Where somebody samples, the drafts of greedy requests are drawn as well, at temperature 1.",
        bugs=("B337",),
        lanes=("MEDUSA", "STANDALONE", "EAGLE"),
        live="drawn drafts, greedy and sampled requests in one batch",
        red=("ACCEPT-1",),
        may=("LAW-3", "ACCEPT-2"),
        edits=(Edit("reference_engine.drafters.base", "law = torch.where(cold, best, hot)", "law = hot"),),
    ),
    Mutant(
        id="samples-share-a-seed-of-chance",
        fault="Samples of a request without a seed are given the stream of the request: they are all alike.",
        bugs=("B111",),
        lanes=("FROZEN_KV_MTP", "none", "NGRAM"),
        live="n > 1 without a seed",
        red=("LAW-3",),
        may=("LAW-2",),
        edits=(Edit("reference_engine.engine", "(1 << 31) + arrival\n", "(1 << 31) + arrival - index\n"),),
    ),
    Mutant(
        id="samples-share-a-mean",
        fault="The rows of all samples of a request are added into one sum.",
        bugs=("B037",),
        lanes=("DFLASH", "none", "EAGLE"),
        live="n > 1 and a mean of hidden rows",
        red=("ALIAS-1",),
        may=("ALIAS-2", "EQUAL-2"),
        edits=(
            Edit(
                "reference_engine.engine",
                "state.pooled = None if pooled_hidden is None else RowMean(pooled_hidden)",
                "pooled = None if pooled_hidden is None else RowMean(pooled_hidden)\n"
                "            state.pooled = states[0].pooled if states else pooled",
            ),
        ),
    ),
    Mutant(
        id="prompt-rows-for-count-0-are-not-needed",
        fault="prompt_logprobs = 0 is taken for none where it is decided whether a cached prefix will do.",
        bugs=("B142",),
        lanes=("EAGLE3", "none", "NGRAM"),
        live="prompt_logprobs = 0 and a prefix hit",
        red=("LOGP-1",),
        may=("COUNT-1",),
        edits=(
            Edit(
                "reference_engine.request",
                "pools_prompt or self.sampling.prompt_logprobs is not None",
                "pools_prompt or bool(self.sampling.prompt_logprobs)",
            ),
        ),
    ),
    Mutant(
        id="as-many-of-the-best-as-the-first-wants",
        fault="How many of the best tokens are listed for prompts is told by the first request of the batch.",
        bugs=("B140",),
        lanes=("MTP", "none", "EAGLE"),
        live="requests with other numbers of prompt_logprobs in one pass",
        red=("LOGP-1",),
        may=("SCHED-3", "EQUAL-2"),
        edits=(
            Edit(
                "reference_engine.runner",
                "compute_logprobs(self.target.logits(hidden), following, max(wanted),",
                "compute_logprobs(self.target.logits(hidden), following, wanted[0],",
            ),
        ),
    ),
    Mutant(
        id="own-pages-are-billed-as-cached",
        fault="A resumed request is billed as cached what it finds of its own.",
        bugs=("B285",),
        lanes=("EXTRACT", "none", "EAGLE"),
        live="a preemption with a prefix cache",
        red=("COUNT-1",),
        may=("EQUAL-2", "SCHED-1"),
        edits=(
            Edit(
                "reference_engine.request",
                "        if self.reported_cached is None:\n            self.reported_cached = num_cached\n",
                "        self.reported_cached = num_cached\n",
            ),
        ),
    ),
    Mutant(
        id="draft-length-is-lost-over-sleep",
        fault="An engine that wakes drafts as much as it did at its start, whatever was set since.",
        bugs=("B325",),
        lanes=("NGRAM", "EAGLE", "EAGLE-tree"),
        live="a draft length that was set before or during a sleep",
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "COUNT-2", "EQUAL-1"),
        edits=(
            Edit(
                "reference_engine.lifecycle",
                "        self.runner.num_steps = self.num_steps\n        self.asleep = False\n",
                "        self.asleep = False\n",
            ),
        ),
    ),
    Mutant(
        id="states-of-a-tree-are-kept-as-of-a-chain",
        fault="With a page goes the state of the node in its place of the window, not of that on the accepted path.",
        bugs=("B206",),
        lanes=("STANDALONE", "MTP"),
        live="a tree of drafts for a recurrent target, and a prefix hit behind it",
        red=("EQUAL-1",),
        may=("ALIAS-1", "STATE-1", "EQUAL-2"),
        edits=(
            Edit(
                "reference_engine.cache.recurrent",
                "after[requests[:, None], path]",
                "after[requests[:, None], offsets.expand_as(path)]",
            ),
        ),
    ),
)
