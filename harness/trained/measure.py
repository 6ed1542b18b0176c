"""Accept lengths of the trained drafters on held-out prompts, counted in an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.contract import Request, SamplingParams, SpecCounters
from harness.engines import engine_factory
from harness.trained import checkpoints
from harness.trained.text import prompts

LEAST = {"standalone": 1.8, "eagle": 2.2, "eagle3": 2.2, "mtp": 2.2}
"""Mean accept length, greedy, chains of 3, that each drafter must reach."""
NUM_PROMPTS = 40
NUM_TOKENS = 96
BATCH = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """`tokens` were delivered; the counters are the engine's own."""

    drafter: str
    tokens: int
    counters: SpecCounters

    @property
    def accept_len(self) -> float:
        """Mean over the verify steps: accepted drafts + 1."""
        return 1 + self.counters.num_accepted_tokens / self.counters.num_drafts


def requests(number: int = NUM_PROMPTS, max_new_tokens: int = NUM_TOKENS) -> list[Request]:
    """Greedy requests of held-out prompts, which go on past EOS into a next document."""
    sampling = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    return [
        Request(request_id=str(index), prompt_token_ids=ids, sampling=sampling)
        for index, ids in enumerate(prompts(number))
    ]


def measure(
    drafter: str, asked: list[Request], *, engine: str = "reference", k: int = 3, root: Path = checkpoints.WEIGHTS
) -> Measured:
    """Run requests on one engine, in full batches that start and prefill together."""
    running = engine_factory(engine).start(checkpoints.setup(drafter, k, root, max_running=BATCH))
    tokens, totals = 0, [0] * (3 + k)
    try:
        for start in range(0, len(asked), BATCH):
            run = running.run(asked[start : start + BATCH])
            tokens += sum(len(done.token_ids) for done in run.completions)
            assert run.counters is not None
            seen = run.counters
            counts = (seen.num_drafts, seen.num_draft_tokens, seen.num_accepted_tokens, *seen.accepted_per_position)
            totals = [total + count for total, count in zip(totals, counts, strict=True)]
    finally:
        running.close()
    counters = SpecCounters(
        num_drafts=totals[0],
        num_draft_tokens=totals[1],
        num_accepted_tokens=totals[2],
        accepted_per_position=tuple(totals[3:]),
    )
    return Measured(drafter, tokens, counters)
