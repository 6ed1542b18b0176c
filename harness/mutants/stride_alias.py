"""Stride/alias: the right data is there, the wrong rows are read, or two readers hold one storage."""

from __future__ import annotations

from harness.mutants.base import Edit, Mutant

MUTANTS = (
    Mutant(
        id="verify-rows-read-as-one-per-request",
        fault="Row i of the strided verify tensor [N * num_draft_tokens, width] is taken for request i's first row.",
        bugs=("B048",),
        lanes=("EAGLE3", "STANDALONE", "EAGLE-tree"),
        live="two requests or more with hidden states",
        red=("ALIAS-1",),
        may=("SCHED-1", "SCHED-3", "EQUAL-2"),
        edits=(
            Edit(
                "reference_engine.output",
                """        elif request.return_hidden_states and path is not None:
            window = index * result.stride
""",
                """        elif request.return_hidden_states and path is not None:
            window = index
""",
            ),
        ),
    ),
    Mutant(
        id="hidden-rows-are-views",
        fault="Delivered hidden rows are views of the step's tensor: writing to one, or the next step, changes others.",
        bugs=("B037",),
        lanes=("EAGLE", "STANDALONE", "EAGLE-tree"),
        red=("ALIAS-2",),
        edits=(
            Edit(
                "reference_engine.output",
                "decode_hidden = tuple(result.hidden[window + node].clone() for node in path[: len(tokens)])",
                "decode_hidden = tuple(result.hidden[window + node] for node in path[: len(tokens)])",
            ),
        ),
    ),
)
