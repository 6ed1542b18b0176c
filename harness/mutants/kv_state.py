"""KV cache state/rollback: after accept, reject, skip or restore the KV or the recurrent state is not that of the
committed tokens. Of the drafter's own only acceptance tells."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

MUTANTS = (
    Mutant(
        id="draft-kv-keeps-approximate-features",
        fault="Draft KV of accepted tokens, made from the drafter's own features, is not made again from the target's.",
        bugs=("B062",),
        lanes=("EAGLE", "EAGLE3"),
        live="an accepted draft",
        red=("STATE-1",),
        may=("ACCEPT-1", "ACCEPT-2", "EQUAL-2", "LAW-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.drafters.feature",
                "        context = self.context(inputs, positions, inputs.max_seq_len, valid=valid)\n",
                """        if inputs.sampled_token_ids.shape[1] > 1:
            valid &= (columns == last) | (columns >= inputs.token_ids.shape[1] - 2)
        context = self.context(inputs, positions, inputs.max_seq_len, valid=valid)
""",
            ),
        ),
    ),
    Mutant(
        id="rejected-drafts-stay-in-draft-kv",
        fault="A chain's rejected drafts are not cut from the draft model's KV: the bonus token goes in behind them.",
        bugs=("B070",),
        lanes=("STANDALONE",),
        live="a rejected draft",
        red=("STATE-1",),
        may=("ACCEPT-1", "ACCEPT-2", "EQUAL-2", "LAW-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.drafters.standalone",
                """        context = self.context(inputs, positions, inputs.max_seq_len, valid=valid)
""",
                """        bound = inputs.max_seq_len
        if inputs.sampled_token_ids.shape[1] > 1:
            rejected = (queries - inputs.num_rows)[:, None]
            positions = torch.where(columns == inputs.num_rows[:, None], positions + rejected, positions)
            bound += queries - 1
        context = self.context(inputs, positions, bound, valid=valid)
""",
            ),
        ),
    ),
    Mutant(
        id="nothing-ingested-without-drafts",
        fault="In steps that draft nothing the drafter returns at once and does not take in what was committed.",
        bugs=("B082", "B083"),
        lanes=("DFLASH", "STANDALONE", "EAGLE", "EAGLE3", "MTP"),
        live="steps with k = 0, and drafts again after them",
        red=("ACCEPT-2",),
        may=("STATE-1", "ACCEPT-1", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.drafters.base",
                """        # Also when nothing is drafted: a later step finds its KV as exact as ever.
""",
                """        if inputs.num_steps == 0:
            return Proposal(inputs.rows.new_empty(len(inputs.rows), 0))
""",
            ),
        ),
    ),
    Mutant(
        id="draft-kv-not-restored-after-preemption",
        fault="A request that is resumed computes the target's KV again, and none of the drafter's.",
        bugs=("B079", "B084"),
        lanes=("MTP", "EAGLE", "EAGLE3", "STANDALONE", "DFLASH"),
        live="a preempted request",
        red=("ACCEPT-2",),
        may=("STATE-1", "ACCEPT-1", "EQUAL-2", "LAW-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.runner",
                """        if drafter is None:
            return
        padding =""",
                """        if drafter is None:
            return
        if batch.kind == "extend" and all(request.output_token_ids for request in batch.requests):
            return
        padding =""",
            ),
        ),
    ),
    Mutant(
        id="compaction-moves-keys-alone",
        fault="When the accepted path of a tree is moved to the front of its window the values stay behind.",
        bugs=("B069",),
        lanes=("EAGLE-tree",),
        live="an accepted path that is not the first nodes of the tree",
        red=("STATE-1",),
        may=(
            "EQUAL-1",
            "EQUAL-2",
            "ALIAS-1",
            "ACCEPT-1",
            "ACCEPT-2",
            "LOGP-1",
            "FINISH-1",
            "SCHED-1",
            "SCHED-3",
            "CONF-1",
        ),
        edits=(
            Edit(
                "reference_engine.cache.kv",
                "move_kv_rows(layer.pages, source.flatten(), target.flatten(), backend=self.backend)",
                "keys = layer.pages[: self.num_kv_heads]\n"
                "            move_kv_rows(keys, source.flatten(), target.flatten(), backend=self.backend)",
            ),
        ),
    ),
    Mutant(
        id="recurrent-state-after-the-whole-window",
        fault="The recurrent state that is kept has taken in the whole verify window, rejected drafts included.",
        bugs=("B071",),
        lanes=("STANDALONE", "MTP"),
        live="a target with recurrent layers, and a rejected draft",
        red=("STATE-1",),
        may=("EQUAL-1", "EQUAL-2", "ALIAS-1", "ACCEPT-1", "LOGP-1", "FINISH-1", "SCHED-1", "SCHED-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.runner",
                "accepted = verdict.accept_index[:size], verdict.accept_lens[:size]",
                "nodes = torch.arange(width, device=rows.device).expand(size, -1)\n"
                "        accepted = nodes, torch.full_like(rows[:size], width)",
            ),
        ),
    ),
)
