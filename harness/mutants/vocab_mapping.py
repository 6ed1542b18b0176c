"""Vocab mapping: draft ids, draft heads and embeddings do not correspond to those of the target."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

IDS = """        if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != draft_vocab:
"""

MUTANTS = (
    Mutant(
        id="d2t-read-as-absolute-ids",
        fault="d2t holds offsets and is read as absolute target ids.",
        bugs=("B240",),
        lanes=("EAGLE3",),
        live="a draft vocabulary that is not the first ids of the target's",
        red=("ACCEPT-1",),
        may=("ACCEPT-2", "CONF-2", "LOGP-1", "CONF-1"),
        edits=(
            Edit(
                "reference_engine.drafters.eagle3",
                'ids = ids + weights.take("d2t", draft_vocab, integer=True)',
                'ids = weights.take("d2t", draft_vocab, integer=True)',
            ),
            Edit(
                "reference_engine.drafters.eagle3", IDS, "        if int(ids.min()) < 0 or int(ids.max()) >= vocab:\n"
            ),
            Edit(
                "reference_engine.drafters.eagle3",
                'if not torch.equal(weights.take("t2d", vocab, integer=True).bool(), mask):',
                'if len(weights.take("t2d", vocab, integer=True)) != len(mask):',
            ),
        ),
    ),
    Mutant(
        id="missing-head-left-random",
        fault="A checkpoint without lm_head starts all the same, with the random head that it was made with.",
        bugs=("B246",),
        lanes=("EAGLE3",),
        live="a draft checkpoint without lm_head",
        red=("CONF-2",),
        edits=(
            Edit(
                "reference_engine.drafters.eagle3",
                '        self.lm_head = Linear([weights.take("lm_head.weight", vocab, hidden)])\n',
                """        head = weights.take_optional("lm_head.weight", vocab, hidden)
        fresh = torch.randn(vocab, hidden, device=self.device).to(config.torch_dtype)
        self.lm_head = Linear([fresh if head is None else head])
""",
            ),
        ),
    ),
    Mutant(
        id="missing-d2t-taken-for-the-first-ids",
        fault="A reduced draft vocabulary without d2t is taken for the first ids of the target's, without a word.",
        bugs=("B242", "B241"),
        lanes=("EAGLE3",),
        live="a draft checkpoint without d2t",
        red=("CONF-2",),
        edits=(
            Edit(
                "reference_engine.drafters.eagle3",
                "        elif draft_vocab != vocab:\n",
                "        elif draft_vocab > vocab:\n",
            ),
            Edit(
                "reference_engine.drafters.eagle3",
                '        if "t2d" in weights:\n            mask =',
                '        if "t2d" in weights and "d2t" not in weights:\n'
                '            weights.take("t2d", vocab, integer=True)\n'
                '        elif "t2d" in weights:\n            mask =',
            ),
        ),
    ),
    Mutant(
        id="vocabularies-not-compared",
        fault="A draft model with another vocabulary is started, and its ids mean other tokens to the target.",
        bugs=("B250",),
        lanes=("STANDALONE",),
        live="a draft model of another vocabulary",
        red=("CONF-2",),
        edits=(
            Edit(
                "reference_engine.drafters.standalone",
                "        if self.model.config.vocab_size != target.config.vocab_size:\n",
                "        if self.model.config.vocab_size < 1:\n",
            ),
        ),
    ),
    Mutant(
        id="own-embeddings-overwritten",
        fault="The loader always shares: a draft head that brings embeddings of its own gets the target's.",
        bugs=("B245",),
        lanes=("EAGLE", "EAGLE3"),
        live="a draft head whose embeddings are not the target's",
        red=("CONF-2",),
        edits=(
            Edit(
                "reference_engine.drafters.eagle",
                "self.embed_tokens = target.embed_tokens if own_embedding is None else own_embedding",
                "self.embed_tokens = target.embed_tokens",
            ),
            Edit(
                "reference_engine.drafters.eagle3",
                "self.embed_tokens = target.embed_tokens if own_embedding is None else own_embedding",
                "self.embed_tokens = target.embed_tokens",
            ),
        ),
    ),
)
