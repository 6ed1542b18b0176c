"""Sampling losslessness: what is emitted has not the law that the target and the request's options give it."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

WRONG_TOKENS = (
    "ALIAS-1",
    "CONF-1",
    "EQUAL-2",
    "FINISH-1",
    "FINISH-2",
    "GRAM-1",
    "LAW-1",
    "LOGP-1",
    "SCHED-1",
    "SCHED-3",
)
"""What sees that a greedy request says something else than it should, or that its KV is that of other tokens."""

PENALTIES = ("CONF-1", "EQUAL-2", "FINISH-1", "FINISH-2", "LAW-1", "LAW-2", "SCHED-1", "SCHED-3")
"""What sees that a penalty acts otherwise behind drafts."""

MUTANTS = (
    Mutant(
        id="first-draft-unverified",
        fault="The first draft of a block is committed as it is: the target's choice there is never compared with it.",
        bugs=("B129",),
        lanes=("NGRAM", "CUSTOM", "STANDALONE"),
        live="greedy requests with drafts",
        red=("EQUAL-1",),
        may=("ACCEPT-1", "ACCEPT-2", "STATE-1", *WRONG_TOKENS),
        smoke="wrong",
        edits=(
            Edit(
                "kernels.verify_chain_greedy",
                """    accepted = (draft_tokens == target_argmax[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    columns = torch.arange(target_argmax.shape[1], device=target_argmax.device)
    return target_argmax.masked_fill(columns > accepted[:, None], -1), accepted + 1
""",
                """    agreed = draft_tokens == target_argmax[:, :-1]
    agreed[:, :1] = draft_tokens[:, :1] >= 0
    accepted = agreed.long().cumprod(dim=1).sum(dim=1)
    columns = torch.arange(target_argmax.shape[1], device=target_argmax.device)
    drafted = torch.cat([draft_tokens, target_argmax[:, -1:]], dim=1)
    emitted = torch.where(columns < accepted[:, None], drafted, target_argmax)
    return emitted.masked_fill(columns > accepted[:, None], -1), accepted + 1
""",
            ),
        ),
    ),
    Mutant(
        id="accept-flags-counted",
        fault="The accept length counts every draft that agrees with its own row, not the leading run of them.",
        bugs=("B288",),
        lanes=("STANDALONE", "CUSTOM"),
        live="a draft that agrees behind one that does not",
        red=("EQUAL-1",),
        may=("ACCEPT-1", "ACCEPT-2", "COUNT-2", "STATE-1", *WRONG_TOKENS),
        edits=(
            Edit(
                "kernels.verify_chain_greedy",
                "(draft_tokens == target_argmax[:, :-1]).long().cumprod(dim=1).sum(dim=1)",
                "(draft_tokens == target_argmax[:, :-1]).long().sum(dim=1)",
            ),
        ),
    ),
    Mutant(
        id="missing-draft-is-token-0",
        fault="A masked load gives 0 where a row has no draft, and 0 is compared as a token id: it is accepted.",
        bugs=("B120",),
        lanes=("CUSTOM", "NGRAM", "STANDALONE"),
        live="a target that says token 0 where a row has fewer drafts than its neighbours",
        red=("COUNT-2",),
        may=("ACCEPT-1", "EQUAL-1", "EQUAL-2", "GRAM-1"),
        edits=(
            Edit(
                "kernels.verify_chain_greedy",
                "(draft_tokens == target_argmax[:, :-1]).long().cumprod(dim=1)",
                "(draft_tokens.clamp(min=0) == target_argmax[:, :-1]).long().cumprod(dim=1)",
            ),
        ),
    ),
    Mutant(
        id="draft-mass-zeroed-in-place",
        fault="The target's mass at a lookup's draft is zeroed in place before it decides on acceptance.",
        bugs=("B105",),
        lanes=("NGRAM", "STANDALONE", "DFLASH"),
        live="sampled requests whose drafts are chosen without chance",
        red=("LAW-2",),
        may=("LOGP-1",),  # no draft is accepted, so its test has no accepted tokens to look at
        edits=(
            Edit(
                "kernels.verify_chain_sampled",
                """    index = torch.where(drafted, draft_tokens, 0)[:, :, None]
""",
                """    index = torch.where(drafted, draft_tokens, 0)[:, :, None]
    if draft_probs is None:
        rest = target_probs[:, :num_drafts]
        hot = F.one_hot(index[:, :, 0], rest.shape[2]).bool() & drafted[:, :, None]
        rest.masked_fill_(hot & (rest < 1), 0.0)
""",
            ),
        ),
    ),
    Mutant(
        id="verify-skips-min-p",
        fault="Verification skips the processors that leave the argmax unchanged, so min_p is not applied to drafts.",
        bugs=("B108",),
        lanes=("EAGLE3", "STANDALONE", "EAGLE-tree"),
        live="min_p",
        red=("LAW-1",),
        may=("CONF-1", "LAW-2"),
        edits=(
            Edit(
                "reference_engine.sampling.sampler",
                "    probs = probabilities(adjusted, sampling)\n",
                "    probs = probabilities(adjusted, replace(sampling, min_p=None) if drafts.shape[1] else sampling)\n",
            ),
        ),
    ),
    Mutant(
        id="verify-skips-repetition-penalty",
        fault="The verify path neither scales logits by the repetition penalty nor gathers tokens for it.",
        bugs=("B113", "B117"),
        lanes=("DFLASH", "STANDALONE", "EAGLE-tree"),
        live="repetition_penalty",
        red=("EQUAL-1",),
        may=PENALTIES,
        edits=(
            Edit(
                "reference_engine.sampling.sampler",
                """        sampling = self.sampling
        adjusted = adjust_logits(""",
                """        sampling = self.sampling
        if drafts is not None and drafts.shape[1]:
            sampling = replace(sampling, repetition=None)
        adjusted = adjust_logits(""",
            ),
        ),
    ),
    Mutant(
        id="verify-filters-in-another-order",
        fault="The verify path takes top-p of the whole law, the plain sampler of what top-k has left.",
        bugs=("B124",),
        lanes=("EAGLE", "STANDALONE", "EAGLE-tree"),
        live="top_k and top_p in one request",
        red=("LAW-1",),
        may=("LAW-2",),
        edits=(
            Edit(
                "kernels.filter_logits",
                "    masses = torch.where(kept, ordered.double().exp(), 0.0)\n",
                "    masses = torch.where(kept | (logits.shape[1] > 1), ordered.double().exp(), 0.0)\n",
            ),
        ),
    ),
    Mutant(
        id="penalties-count-all-drafts",
        fault="Penalties of every row of a window count all of its drafts, those that are not before the row as well.",
        bugs=("B116",),
        lanes=("MEDUSA", "STANDALONE", "CUSTOM"),
        live="a penalty on output tokens",
        red=("EQUAL-1",),
        may=PENALTIES,
        edits=(
            Edit(
                "reference_engine.sampling.sampler",
                "on_path = F.pad(hot.cumsum(1), (0, 0, 1, 0))",
                "on_path = hot.sum(1, keepdim=True).expand(-1, drafts.shape[1] + 1, -1)",
            ),
        ),
    ),
    Mutant(
        id="recovered-from-the-whole-law",
        fault="The token that replaces a rejected draft is drawn from the whole law, not from what is left of it.",
        bugs=("B133",),
        lanes=("FROZEN_KV_MTP", "STANDALONE", "CUSTOM"),
        live="sampled requests",
        red=("LAW-2",),
        edits=(
            Edit(
                "kernels.verify_chain_sampled",
                "    rejected = tokens[row, accepted]\n",
                "    rejected = torch.full_like(accepted, -1)\n",
            ),
        ),
    ),
    Mutant(
        id="siblings-against-the-whole-mass",
        fault="The second child of a tree node is weighed as if the first had not been rejected.",
        bugs=("B125",),
        lanes=("EAGLE-tree",),
        live="sampled requests with draft trees",
        red=("LAW-1",),
        may=("GRAM-1", "LAW-2"),
        edits=(
            Edit(
                "kernels.verify_tree_sampled",
                "            left = torch.where(rejected, left - weight, left)\n",
                "",
            ),
        ),
    ),
    Mutant(
        id="drafts-forced-greedy",
        fault="Drafts are the drafter's argmax, while acceptance weighs them as if they were drawn.",
        bugs=("B110",),
        lanes=("EAGLE", "STANDALONE", "MTP"),
        live="sampled requests, draft_sample_method='probabilistic'",
        red=("LAW-2",),
        may=("LOGP-1",),
        edits=(
            Edit(
                "reference_engine.drafters.base",
                "token = self.to_target_ids(draw(law, coin, self.backend))",
                "token = self.to_target_ids(greedy)",
            ),
        ),
    ),
    Mutant(
        id="seed-by-place-in-the-batch",
        fault="A request draws from the generator of its place in the batch: who else is there changes its tokens.",
        bugs=("B111",),
        lanes=("MTP", "none", "EAGLE-tree"),
        live="sampled requests with a seed",
        red=("LAW-3",),
        may=("EQUAL-2", "LAW-2", "SCHED-1", "SCHED-3"),
        edits=(
            Edit(
                "reference_engine.sampling.processors",
                "seeds=torch.tensor([r.seed for r in requests] + [0] * pad, device=device)[:, None],",
                "seeds=torch.tensor([r.seed + i for i, r in enumerate(requests)] + [0] * pad, device=device)[:, None],",
            ),
        ),
    ),
    Mutant(
        id="generator-shared-by-reference",
        fault="Requests without a seed share one generator, each from its start: the same prompt gives the same text.",
        bugs=("B111",),
        lanes=("FROZEN_KV_MTP", "none", "NGRAM"),
        live="sampled requests without a seed",
        red=("LAW-3",),
        may=("LAW-2",),
        edits=(
            Edit(
                "reference_engine.engine",
                "unseeded = (self.config.seed << 32) + (1 << 31) + arrival",
                "unseeded = (self.config.seed << 32) + (1 << 31)",
            ),
        ),
    ),
)
