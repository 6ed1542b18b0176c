"""Numerics/dtype: norms, residuals, scales and precision that are not those the weights were made for."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

MUTANTS = (
    Mutant(
        id="superfluous-norm-before-the-draft-layer",
        fault="The draft head normalises embedding and feature before it merges them, as its architecture does not.",
        bugs=("B281", "B282"),
        lanes=("EAGLE", "EAGLE-tree"),
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "LOGP-1", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.drafters.eagle",
                "        x = self.fc(torch.cat([embedding, features], dim=-1))\n",
                "        both = torch.cat([embedding, features], dim=-1)\n"
                "        x = self.fc(F.rms_norm(both, both.shape[-1:]))\n",
            ),
        ),
    ),
    Mutant(
        id="residual-missing",
        fault="The residual block of a draft head leaves its residual out.",
        bugs=("B282",),
        lanes=("MEDUSA",),
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "LOGP-1", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.drafters.medusa",
                "rows = rows + F.silu(block(rows))",
                "rows = F.silu(block(rows))",
            ),
        ),
    ),
    Mutant(
        id="shared-embeddings-scaled",
        fault="The drafter shares the target's embeddings in another form than its own: scaled by sqrt(hidden).",
        bugs=("B269",),
        lanes=("FROZEN_KV_MTP",),
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "LOGP-1", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.drafters.frozen_kv_mtp",
                "F.embedding(token_ids, self.target.embed_tokens), rows]",
                "F.embedding(token_ids, self.target.embed_tokens) * rows.shape[-1] ** 0.5, rows]",
            ),
        ),
    ),
    Mutant(
        id="padding-wins-the-argmax",
        fault="Where no token is left to choose the verifier's padding wins the argmax: an id behind the vocabulary.",
        bugs=("B284",),
        lanes=("NGRAM", "STANDALONE", "EAGLE"),
        live="masks that leave no token behind accepted drafts",
        red=("SHAPE-2",),
        may=("CONF-1", "EQUAL-1"),
        edits=(
            Edit(
                "reference_engine.sampling.sampler",
                "emitted = verdict.emitted.masked_fill(verdict.emitted == logits.shape[-1], 0)",
                "emitted = verdict.emitted",
            ),
        ),
    ),
)
