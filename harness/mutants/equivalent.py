"""General mutants that no check can see, with the reason: by the id that `draftproof mutants general` prints."""

from __future__ import annotations

from collections.abc import Mapping

PLACES: Mapping[str, Mapping[str, str]] = {
    "reference_engine.verification.tree:tree_of": {
        "#2: 1 -> 2": "build_tree takes any negative id for no node",
    },
    "reference_engine.sampling.sampler:verify": {
        ": 0 -> 1": "the last token of a stuck request is not delivered, and what feeds a step launched before "
        "that need only be an id of the vocabulary",
    },
    "reference_engine.sampling.processors:SamplingBatch.of": {
        ": list(p.allowed_token_ids) -> p.allowed_token_ids": "inside an index, torch reads a tuple of ids as a list",
        "#7: 0 -> 1": "the seed of a padded row: what it draws is thrown away",
    },
    "reference_engine.sampling.bad_words:output_tails": {
        "#2: 0 -> 1": "column 0 holds a prompt token, and those are masked",
        ": tree.parents[:, draft].clamp(min=0) -> tree.parents[:, draft]": "a draft that is no node has the parent -1, "
        "which reads the last row, and nobody reads the row of what is no node",
    },
}
"""By place, what follows it in the id."""

EQUIVALENT: Mapping[str, str] = {
    place + change: reason for place, changes in PLACES.items() for change, reason in changes.items()
}
