"""Config validation: what does not fit is let in, what was asked for is not heeded, limits are those of another."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant
from harness.mutants.scheduler import EVERYBODY

MUTANTS = (
    Mutant(
        id="any-shape-is-loaded",
        fault="Tensors are taken from a drafter's or target's checkpoint whatever their shape.",
        bugs=("B299",),
        lanes=("DFLASH", "none", "MEDUSA"),
        live="a checkpoint with a tensor of another shape",
        red=("CONF-2",),
        edits=(
            Edit(
                "reference_engine.model.loader",
                "        if tuple(tensor.shape) != shape:\n",
                "        if tensor.ndim != len(shape):\n",
            ),
        ),
    ),
    Mutant(
        id="the-drafter-has-a-length-of-its-own-making",
        fault="The context length of the target is taken for the draft model's, which has fewer positions.",
        bugs=("B300", "B302"),
        lanes=("STANDALONE",),
        live="a draft model with fewer positions than its target",
        red=("STATE-1",),
        may=("ACCEPT-1", "EQUAL-1"),
        edits=(
            Edit(
                "reference_engine.drafters.standalone",
                "        self.max_positions = self.model.config.max_positions\n",
                "        self.max_positions = config.context_length\n",
            ),
        ),
    ),
    Mutant(
        id="a-drafter-of-one-length-takes-any",
        fault="Draft lengths below the set one are taken, and the heads that draft one length alone fail on them.",
        bugs=("B324",),
        lanes=("MEDUSA",),
        live="set_num_steps, a limit of a request, or the end of the context",
        red=("CONF-1",),
        may=EVERYBODY,
        edits=(
            Edit(
                "reference_engine.drafters.medusa",
                "        self.choose(inputs, drafting)\n        for head in self.heads[1",
                """        assert inputs.num_steps == self.spec.num_steps, "the heads draft one length"
        self.choose(inputs, drafting)
        for head in self.heads[1""",
            ),
        ),
    ),
    Mutant(
        id="draft-limit-is-never-read",
        fault="How much may be drafted for a request can be said, and nobody reads it.",
        bugs=("B325",),
        lanes=("FROZEN_KV_MTP", "EAGLE", "CUSTOM"),
        live="num_speculative_tokens",
        red=("CONF-1",),
        may=("ACCEPT-1",),
        edits=(
            Edit(
                "reference_engine.engine",
                "            state.num_speculative_tokens = limit\n",
                "",
            ),
        ),
    ),
    Mutant(
        id="room-for-drafts-is-not-asked-for",
        fault="A request is let in when its tokens fit into the pool, though the drafts beside them never will.",
        bugs=("B293", "B182"),
        lanes=("CUSTOM", "MEDUSA", "EAGLE-tree"),
        live="a pool with room for the tokens of a request and no more",
        red=("CONF-1",),
        edits=(
            Edit(
                "reference_engine.engine",
                "        pages = pages_for(total + config.slack_tokens, config.page_size)\n",
                "        pages = pages_for(total, config.page_size)\n",
            ),
        ),
    ),
)
