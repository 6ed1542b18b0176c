"""Aux hidden states: what the drafter is given of the target is missing, of another layer or of another step."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

COLLECTED = """        hidden, aux = self.target.forward(token_ids, context, self.cache, self._aux_layer_ids)
        self._count_forward(token_ids, aux)
"""
"""Of a prefill; a verify step has a line between these."""

ZEROS = """        if layers != self._aux_layer_ids:
            aux = hidden.new_zeros(*hidden.shape[:2], len(self._aux_layer_ids) * hidden.shape[2])
"""
"""The buffer that nobody has filled."""

MUTANTS = (
    Mutant(
        id="no-aux-states-with-prompt-logprobs",
        fault="The branch taken when prompt logprobs are wanted does not collect auxiliary states.",
        bugs=("B251",),
        lanes=("EXTRACT", "EAGLE3", "DFLASH"),
        live="a request with prompt logprobs; the real engine crashed where the states were concatenated",
        red=("STATE-2",),
        may=("STATE-1", "ALIAS-1", "ACCEPT-1", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.runner",
                COLLECTED,
                """        wanted = any(request.sampling.prompt_logprobs is not None for request in batch.requests)
        layers = () if wanted else self._aux_layer_ids
        hidden, aux = self.target.forward(token_ids, context, self.cache, layers)
        self._count_forward(token_ids, aux)
"""
                + ZEROS,
            ),
        ),
    ),
    Mutant(
        id="aux-states-of-the-last-chunk-alone",
        fault="Auxiliary states are collected for the last chunk of a prompt alone, the drafter is primed from that.",
        bugs=("B252",),
        lanes=("EAGLE3", "DFLASH", "EXTRACT"),
        live="a prefill in chunks",
        red=("STATE-2",),
        may=("STATE-1", "ALIAS-1", "ACCEPT-1", "ACCEPT-2", "EQUAL-2", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.runner",
                COLLECTED,
                """        layers = self._aux_layer_ids if any(batch.ends_prefill) else ()
        hidden, aux = self.target.forward(token_ids, context, self.cache, layers)
        self._count_forward(token_ids, aux)
"""
                + ZEROS,
            ),
        ),
    ),
    Mutant(
        id="aux-layer-ids-shifted-twice",
        fault="Layer ids come under two conventions, and the + 1 of one of them is added under both.",
        bugs=("B254",),
        lanes=("EAGLE3",),
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "LOGP-1", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.model.config",
                "ids, shift = (own, 0) if own is not None else (others or [], 1)",
                "ids, shift = (own, 1) if own is not None else (others or [], 2)",
            ),
        ),
    ),
    Mutant(
        id="aux-layer-ids-not-shifted",
        fault="Ids that count from the output of a layer are taken for those of inputs: each state is a layer early.",
        bugs=("B258",),
        lanes=("DFLASH",),
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "LOGP-1", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.drafters.dflash",
                "self.aux_layer_ids = tuple(layer + 1 for layer in layer_ids)",
                "self.aux_layer_ids = tuple(layer_ids)",
            ),
        ),
    ),
    Mutant(
        id="last-layer-output-captured-as-nothing",
        fault="States are captured before each layer, so that the id of the last one's output captures nothing.",
        bugs=("B256",),
        lanes=("EXTRACT",),
        red=("ALIAS-1",),
        may=("CONF-1",),
        edits=(
            Edit(
                "reference_engine.model.causal_lm",
                "        streams[len(self.layers)] = x\n",
                "        streams[len(self.layers)] = torch.zeros_like(x)\n",
            ),
        ),
    ),
    Mutant(
        id="every-step-fed-the-targets-row",
        fault="A draft step's output row is not kept for the next one: every step is fed the target's row again.",
        bugs=("B047",),
        lanes=("FROZEN_KV_MTP",),
        live="two drafts or more",
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "LOGP-1", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.drafters.frozen_kv_mtp",
                "drafting.logits, drafting.features = following.logits, following.features",
                "drafting.logits = following.logits",
            ),
        ),
    ),
)
