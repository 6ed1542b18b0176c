"""Overshoot/truncation: a block of several tokens meets a stop, a length cap or a minimum length."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

MUTANTS = (
    Mutant(
        id="cap-checked-before-stop",
        fault="A block that reaches the length cap ends there for its length; a stop inside it is not looked for.",
        bugs=("B050",),
        lanes=("STANDALONE", "EAGLE", "MTP", "MEDUSA"),
        live="a stop and the length cap in one block",
        red=("FINISH-1",),
        may=("EQUAL-1", "EQUAL-2", "FINISH-2", "SCHED-1", "SCHED-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.output",
                """        for kept, token in enumerate(tokens, start=1):
""",
                """        room = request.sampling.max_new_tokens - len(request.output_token_ids)
        if room <= len(tokens) and request.matcher is None:
            request.output_token_ids += tokens[:room]
            self.finish(request, "length")
            return tokens[:room]
        for kept, token in enumerate(tokens, start=1):
""",
            ),
        ),
    ),
    Mutant(
        id="stop-only-in-last-token",
        fault="A stop is looked for in the last token of a block alone, so that the block runs on behind it.",
        bugs=("B053", "B051"),
        lanes=("DFLASH", "STANDALONE", "NGRAM"),
        live="a stop in the middle of an accepted block",
        red=("FINISH-1",),
        may=("EQUAL-1", "EQUAL-2", "FINISH-2", "SCHED-1", "SCHED-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.output",
                "            reason = self._finish_reason(request, token)\n",
                """            full = len(request.output_token_ids) >= request.sampling.max_new_tokens
            reason = self._finish_reason(request, token) if full or kept == len(tokens) else None
""",
            ),
        ),
    ),
    Mutant(
        id="budget-checked-once-a-block",
        fault="The length cap is looked at once a block, so that the last block runs over max_new_tokens.",
        bugs=("B056",),
        lanes=("NGRAM", "STANDALONE", "EAGLE"),
        live="a block that reaches over the cap",
        red=("FINISH-2",),
        may=("FINISH-1", "EQUAL-1", "EQUAL-2", "SCHED-1", "SCHED-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.output",
                "            if reason is not None:\n",
                '            if reason == "stop" or (reason and kept == len(tokens)):\n',
            ),
        ),
    ),
    Mutant(
        id="minimum-length-masks-one-row-too-far",
        fault="Rows behind a draft count one output token too few, so that min_new_tokens bans stops one row too far.",
        bugs=("B041",),
        lanes=("CUSTOM", "NGRAM", "STANDALONE"),
        live="a stop right behind the minimum length, inside a block",
        red=("FINISH-2",),
        may=("FINISH-1", "EQUAL-1", "EQUAL-2", "SCHED-1", "SCHED-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.sampling.sampler",
                "steps = torch.arange(drafts.shape[1] + 1, device=rows.device)",
                "steps = torch.arange(-1, drafts.shape[1], device=rows.device).clamp(min=0)",
            ),
        ),
    ),
    Mutant(
        id="hidden-rows-not-cut",
        fault="Every accepted row is returned: where the end of a request cuts the last block its hidden rows stay.",
        bugs=("B059",),
        lanes=("FROZEN_KV_MTP", "EAGLE", "EAGLE3", "STANDALONE", "DFLASH"),
        live="hidden states, and a last block that reaches over the end",
        red=("COUNT-1",),
        may=("ALIAS-1", "EQUAL-1", "EQUAL-2", "FINISH-1", "SCHED-1", "SCHED-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.output",
                "decode_hidden = tuple(result.hidden[window + node].clone() for node in path[: len(tokens)])",
                "decode_hidden = tuple(result.hidden[window + node].clone() for node in path if node >= 0)",
            ),
        ),
    ),
    Mutant(
        id="bonus-token-dropped",
        fault="When all drafts are accepted the bonus token is dropped: k tokens a step, never k + 1.",
        bugs=("B055",),
        lanes=("MTP", "STANDALONE", "NGRAM"),
        live="a block that is accepted whole; the text stays right",
        red=("ACCEPT-2",),
        may=("ACCEPT-1", "LOGP-1", "CONF-1"),
        edits=(
            Edit(
                "kernels.verify_chain_greedy",
                "accepted = (draft_tokens == target_argmax[:, :-1]).long().cumprod(dim=1).sum(dim=1)",
                "accepted = (draft_tokens == target_argmax[:, :-1])[:, :-1].long().cumprod(dim=1).sum(dim=1)",
            ),
        ),
    ),
)
