"""Grammar/structured output: the grammar matcher and the block of several tokens disagree."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

COMMIT = """            followed = request.matcher is None or request.matcher.accept(token)
            assert followed, f"{request.owner} was given token {token}, which its grammar forbids"
"""

RAISES = (
    "ACCEPT-1",
    "ACCEPT-2",
    "ALIAS-1",
    "ALIAS-2",
    "COUNT-1",
    "COUNT-2",
    "EQUAL-1",
    "EQUAL-2",
    "FINISH-1",
    "FINISH-2",
    "KV-1",
    "LOGP-1",
    "SCHED-1",
    "SCHED-2",
    "SCHED-3",
    "SHAPE-2",
    "STATE-1",
)
"""Invariants with a test among whose requests one has a grammar: where it is broken, all of them raise."""

MUTANTS = (
    Mutant(
        id="grammar-masks-the-first-place-only",
        fault="Only the first place of a block is masked by the grammar; a token that it refuses is not stopped.",
        bugs=("B156", "B161"),
        lanes=("STANDALONE", "MTP", "CUSTOM"),
        live="a grammar that forbids what the target would say behind an accepted draft",
        red=("GRAM-1",),
        may=("CONF-1", "EQUAL-1", "EQUAL-2", "FINISH-1", "SCHED-1", "SCHED-3"),
        edits=(
            Edit(
                "reference_engine.grammar",
                "            kept[row] = torch.tensor(_walk(matcher, tokens, above, words[row]), dtype=torch.bool)\n",
                "            matcher.fill(words[row, 0])\n",
            ),
            Edit(
                "reference_engine.output",
                COMMIT,
                "            _ = request.matcher is None or request.matcher.accept(token)\n",
            ),
        ),
    ),
    Mutant(
        id="drafts-behind-the-end-of-the-grammar",
        fault="Drafts behind an EOS that ends the grammar stay in the window and are accepted, to be cut later.",
        bugs=("B150",),
        lanes=("CUSTOM",),
        live="a drafter that says EOS again and again",
        red=("GRAM-1",),
        edits=(
            Edit(
                "reference_engine.grammar",
                "    kept = [False] * len(drafts)\n",
                "    kept = [True] * len(drafts)\n",
            ),
        ),
    ),
    Mutant(
        id="ended-matcher-is-asked",
        fault="The block path asks a matcher that has ended for one more mask.",
        bugs=("B152",),
        lanes=("CUSTOM",),
        live="a draft that ends the grammar",
        red=("GRAM-1",),
        may=("COUNT-1", "COUNT-2", "EQUAL-1", "FINISH-1", "KV-1", "SCHED-2", "SHAPE-1", "SHAPE-2"),
        edits=(
            Edit(
                "reference_engine.grammar",
                "            if token_id in matcher.eos_token_ids:\n",
                "            if not int(words[node, token_id // 32]) >> token_id % 32 & 1:\n",
            ),
            Edit(
                "reference_engine.grammar",
                "            elif int(words[node, token_id // 32]) >> token_id % 32 & 1:\n",
                "            else:\n",
            ),
        ),
    ),
    Mutant(
        id="grammar-lags-behind-overlap",
        fault="Under overlap scheduling masks are made before the last block is known; such requests are aborted.",
        bugs=("B157",),
        lanes=("EAGLE", "MTP", "EAGLE-tree"),
        live="a grammar under overlap scheduling",
        red=("GRAM-1",),
        may=("EQUAL-2", "EQUAL-1", "FINISH-1", "SCHED-1", "SCHED-3"),
        edits=(
            Edit(
                "reference_engine.engine",
                "        if any(result.batch.has_grammar for result in self._in_flight):\n            self._drain()\n",
                "",
            ),
            Edit(
                "reference_engine.output",
                COMMIT,
                """            if request.matcher is not None and not request.matcher.accept(token):
                self.finish(request, "abort")
                return tokens[:kept]
""",
            ),
        ),
    ),
    Mutant(
        id="grammar-walks-a-tree-as-a-chain",
        fault="The grammar steps through the nodes of a draft tree in their order, as if each followed the one before.",
        bugs=("B158",),
        lanes=("EAGLE-tree",),
        live="a grammar and draft trees",
        red=("GRAM-1",),
        may=("CONF-1", *RAISES),
        edits=(
            Edit(
                "reference_engine.grammar",
                "    lists = zip(matchers, drafts.tolist(), parents.tolist(), strict=False)\n",
                """    chain = [list(range(num_drafts))] * rows
    lists = zip(matchers, drafts.tolist(), chain, strict=False)
""",
            ),
        ),
    ),
)
