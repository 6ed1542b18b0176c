"""Shape contract: a function hands over, or assumes, another number of rows, columns or ids than was agreed."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

KEEPS_WHAT_FITS = Edit(
    "reference_engine.runner",
    "pool.draft_tokens[rows[:size], :width] = drafts[:size]",
    "pool.draft_tokens[rows[:size], :width] = drafts[:size, :width]",
)
"""A runner that takes as many columns as it has room for, so that a proposal of the wrong width goes through unseen."""

MUTANTS = (
    Mutant(
        id="propose-returns-all-sampled",
        fault="The drafter returns the whole sampled tensor, [N, k + 1] once a draft was accepted, as its one draft.",
        bugs=("B001",),
        lanes=("EXTRACT",),
        live="the runner cuts what does not fit; the real one crashed there",
        red=("SHAPE-1",),
        may=("ACCEPT-1", "LAW-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.drafters.extract_hidden_states",
                "drafts = last.masked_fill(inputs.discard, PLACEHOLDER)[:, None]",
                "drafts = inputs.sampled_token_ids.masked_fill(inputs.discard[:, None], PLACEHOLDER)",
            ),
            KEEPS_WHAT_FITS,
        ),
    ),
    Mutant(
        id="proposal-wider-than-the-current-k",
        fault="When k shrinks the drafter returns its buffer in full width, not the k columns that it was asked for.",
        bugs=("B028",),
        lanes=("MTP",),
        live="fewer draft steps than the engine was started with",
        red=("SHAPE-1",),
        may=("CONF-1",),
        edits=(
            Edit(
                "reference_engine.drafters.base",
                "proposal.token_ids = proposal.token_ids.masked_fill(inputs.discard[:, None], PLACEHOLDER)\n",
                "drafts = proposal.token_ids.masked_fill(inputs.discard[:, None], PLACEHOLDER)\n"
                "        proposal.token_ids = drafts.new_zeros(len(drafts), self.spec.num_steps)\n"
                "        proposal.token_ids[:, : drafts.shape[1]] = drafts\n",
            ),
            KEEPS_WHAT_FITS,
        ),
    ),
    Mutant(
        id="stale-columns-of-a-larger-k",
        fault="Draft columns behind the current k keep the ids of a longer draft, and come to be verified.",
        bugs=("B028",),
        lanes=("MEDUSA", "STANDALONE", "NGRAM"),
        live="draft lengths that change, or that differ from request to request",
        red=("ACCEPT-1",),
        may=("EQUAL-2", "LAW-3", "SCHED-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.runner",
                """        if width < pool.draft_tokens.shape[1]:
            pool.draft_tokens[rows[:size]] = PLACEHOLDER
""",
                "",
            ),
        ),
    ),
    Mutant(
        id="next-token-from-column-0",
        fault="The next token is taken from column 0 of the sampled tensor, not from its last valid column.",
        bugs=("B027",),
        lanes=("EXTRACT",),
        live="a step that commits two tokens",
        red=("ACCEPT-1",),
        may=("CONF-1",),
        edits=(
            Edit(
                "reference_engine.drafters.extract_hidden_states",
                "drafts = last.masked_fill(inputs.discard, PLACEHOLDER)[:, None]",
                "first = torch.where(sampled[:, 0] >= 0, sampled[:, 0], last)\n"
                "        drafts = first.masked_fill(inputs.discard, PLACEHOLDER)[:, None]",
            ),
        ),
    ),
    Mutant(
        id="no-marker-in-unused-slots",
        fault="The greedy verifier leaves the target's choices in the slots behind the accepted block.",
        bugs=("B002",),
        lanes=("NGRAM", "CUSTOM"),
        live="a rejected draft; nobody reads the slots, since all go by the accept lengths",
        red=("SHAPE-2",),
        may=("CONF-1",),
        edits=(
            Edit(
                "kernels.verify_chain_greedy",
                "return target_argmax.masked_fill(columns > accepted[:, None], -1), accepted + 1",
                "return target_argmax.clone(), accepted + 1",
            ),
        ),
    ),
    Mutant(
        id="placeholders-reach-the-embedding",
        fault="Slots without a draft are looked up as id -1, which reads whatever lies before the first row.",
        bugs=("B190",),
        lanes=("CUSTOM", "NGRAM", "EAGLE"),
        live="a request with fewer drafts than its neighbour",
        red=("SHAPE-2",),
        may=("CONF-1",),
        edits=(
            Edit(
                "reference_engine.runner",
                "token_ids = torch.cat([token_ids, drafts.clamp(min=0)], dim=1)",
                "token_ids = torch.cat([token_ids, drafts], dim=1)",
            ),
            Edit(
                "reference_engine.model.causal_lm",
                "x = F.embedding(input_ids.reshape(-1), self.embed_tokens)",
                "x = self.embed_tokens[input_ids.reshape(-1)]",
            ),
        ),
    ),
)
