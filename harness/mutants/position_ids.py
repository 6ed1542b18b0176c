"""Position ids: positions, slots, windows or rotary coordinates are wrong for some rows."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

MUTANTS = (
    Mutant(
        id="embedding-masked-at-position-0",
        fault="The embedding at position 0 is zeroed as if nothing stood there; after the shift it is a real token's.",
        bugs=("B103", "B104"),
        lanes=("MTP",),
        live="a draft that looks at the first row",
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "EQUAL-2", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.drafters.mtp",
                "        rotary = self.rotary(context.positions)\n",
                "        embedding = embedding.masked_fill(context.positions.reshape(-1, 1) == 0, 0.0)\n"
                "        rotary = self.rotary(context.positions)\n",
            ),
        ),
    ),
    Mutant(
        id="slots-from-rotary-positions",
        fault="Draft KV goes to slots computed from the rotary position: siblings of a tree overwrite each other.",
        bugs=("B098",),
        lanes=("EAGLE-tree",),
        live="rotary positions that are not the places in the cache",
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "EQUAL-2", "LOGP-1", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.drafters.base",
                "                base + first + offsets,\n",
                "                (base + step - 1).expand(-1, spec.topk),\n",
            ),
        ),
    ),
    Mutant(
        id="block-window-starts-one-late",
        fault="The start of the block is given one too far: every row sees a slot that nobody has written.",
        bugs=("B094",),
        lanes=("DFLASH",),
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "EQUAL-2", "LOGP-1", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.drafters.dflash",
                "            window_start=start,\n",
                "            window_start=start + 1,\n",
            ),
        ),
    ),
    Mutant(
        id="draft-positions-without-the-cached-prefix",
        fault="After a prefix hit the drafter counts rotary positions from the first token that was computed.",
        bugs=("B102",),
        lanes=("EAGLE", "EAGLE3"),
        live="a prefix hit",
        red=("STATE-1",),
        may=("ACCEPT-1", "ACCEPT-2", "EQUAL-2", "LAW-3", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.drafters.feature",
                "        context = self.context(inputs, positions, inputs.max_seq_len, valid=valid)\n",
                """        rotary = (positions - inputs.computed_from[:, None]).clamp(min=0)
        context = self.context(inputs, positions, inputs.max_seq_len, valid=valid, positions=rotary)
""",
            ),
        ),
    ),
)
