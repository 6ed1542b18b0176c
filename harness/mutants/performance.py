"""Performance regression: the text is right by construction, but the drafter has stopped helping."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

MUTANTS = (
    Mutant(
        id="one-long-request-stops-drafting",
        fault="One request near the end of its context turns the drafts of the whole batch into token 0.",
        bugs=("B301",),
        lanes=("DFLASH", "MTP", "STANDALONE"),
        live="a request that has no room for all drafts, and neighbours that have",
        red=("ACCEPT-1",),
        edits=(
            Edit(
                "reference_engine.runner",
                "        size = len(batch.requests)\n        width = plan.num_drafts\n",
                """        size = len(batch.requests)
        if bool((inputs.room[:size] < plan.num_steps).any()):
            drafts = drafts.clamp(max=0)
        width = plan.num_drafts
""",
            ),
        ),
    ),
    Mutant(
        id="draft-weights-lost-over-sleep",
        fault="The drafter's weights are given up with the rest when the engine sleeps, and not loaded when it wakes.",
        bugs=("B345", "B346"),
        lanes=("MEDUSA", "EAGLE3", "STANDALONE"),
        live="sleep and wake",
        red=("ACCEPT-2",),
        may=("STATE-1",),
        edits=(
            Edit(
                "reference_engine.lifecycle",
                "        self.scheduler.pool = self.pool\n        self.runner.num_steps",
                """        if self.drafter is not None:
            for tensor in _drafter_weights(self.drafter, self.target).tensors.values():
                tensor.zero_()
        self.scheduler.pool = self.pool
        self.runner.num_steps""",
            ),
        ),
    ),
    Mutant(
        id="weight-sync-shuffles-the-draft",
        fault="A weight update runs the post-processing of loading again over drafter weights that were not sent.",
        bugs=("B349",),
        lanes=("EAGLE3", "MEDUSA", "EAGLE"),
        live="reload_target",
        red=("ACCEPT-2",),
        may=("STATE-1",),
        edits=(
            Edit(
                "reference_engine.lifecycle",
                "        self._replace(held, read)\n\n    @property\n    def has_drafter_weights",
                """        self._replace(held, read)
        if self.drafter is not None and drafter is None:
            for tensor in _drafter_weights(self.drafter, self.target).tensors.values():
                tensor.copy_(tensor.roll(1, 0))

    @property
    def has_drafter_weights""",
            ),
        ),
    ),
    Mutant(
        id="weight-update-leaves-the-draft",
        fault="A weight update reaches the target's own layers only: the draft layers in the same checkpoint go stale.",
        bugs=("B348", "B347"),
        lanes=("MTP",),
        live="reload_target after the files have changed",
        red=("ACCEPT-1",),
        edits=(
            Edit(
                "reference_engine.lifecycle",
                "        if self.drafter is not None and drafter is not None:\n            held |=",
                "        if self.drafter is not None and drafter is None:\n            held |=",
            ),
        ),
    ),
    Mutant(
        id="second-draft-from-the-first-feature",
        fault="Every draft step behind the first is fed the feature of the first: later places are hardly accepted.",
        bugs=("B337",),
        lanes=("EAGLE", "EAGLE3", "MTP"),
        live="chains of three drafts or more",
        red=("ACCEPT-1",),
        may=("ACCEPT-2",),
        edits=(
            Edit(
                "reference_engine.drafters.base",
                "drafting.logits, drafting.features = self.step(drafting.tokens[-1], drafting.features, context)",
                "drafting.logits, _ = self.step(drafting.tokens[-1], drafting.features, context)",
            ),
        ),
    ),
    Mutant(
        id="drafting-stays-off",
        fault="Drafting that was switched off for a while does not come back: a flag of those steps stays on.",
        bugs=("B338",),
        lanes=("FROZEN_KV_MTP", "NGRAM", "STANDALONE"),
        live="set_num_steps(0), then more again",
        red=("ACCEPT-2",),
        may=("ACCEPT-1",),
        edits=(
            Edit(
                "reference_engine.engine",
                "        if not self.asleep:\n            self.runner.num_steps = num_steps\n",
                """        started = getattr(self, "_started", False)
        if not self.asleep and (self.runner.num_steps or not started):
            self.runner.num_steps = num_steps
        self._started = True
""",
            ),
        ),
    ),
)
