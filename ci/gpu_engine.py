"""The reference engine on CUDA gives what it gives on the CPU: every drafter, as it is, in padded batch buckets, and
with CUDA graphs over these."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.contract import Request, Run, SamplingParams
from harness.engines.reference import ReferenceEngine
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES

BUCKETS = (1, 2, 4, 8)
ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": {"batch_buckets": BUCKETS},
    "CUDA graphs": {"batch_buckets": BUCKETS, "cuda_graphs": True},
}
"""Changes of the set-up, fields of `EngineConfig`."""


def requests(lane: Lane) -> list[Request]:
    """Ragged prompts and lengths, so that the batch shrinks step by step; one is sampled."""
    vocab = lane.target().vocab_size
    made = []
    for index in range(6):
        prompt = tuple((7 * index + 3 * position) % vocab for position in range(5 + 9 * index))
        sampling = SamplingParams(max_new_tokens=4 + 5 * index, temperature=0.8 if index == 5 else 0.0, seed=index)
        made.append(Request(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling))
    return made


def outcome(run: Run) -> list[tuple[object, ...]]:
    return [(c.request_id, c.token_ids, c.finish_reason, c.accept_lens) for c in run.completions]


def main(device: str = "cuda") -> int:
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        for name, spec in LANES.items():
            lane = Lane("reference", spec, Path(folder))
            batch = requests(lane)
            expected = outcome(lane.run(batch, device="cpu"))
            for arm, changes in ARMS.items():
                if device == "cpu" and arm == "CUDA graphs":
                    continue
                engine = ReferenceEngine(lane.setup(device=device), **changes)
                got = outcome(engine.run(batch))
                wrong = [ours[0] for ours, theirs in zip(got, expected, strict=True) if ours != theirs]
                if wrong:
                    failures.append(f"{name}, {arm}: {wrong} differ from the CPU")
    for failure in failures:
        print(failure)  # noqa: T201
    print(f"{len(LANES)} drafters, {len(failures)} differences")  # noqa: T201
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
