"""The reference engine on CUDA gives what it gives on the CPU: every drafter, with and without padded batch buckets."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from harness.contract import Request, Run, SamplingParams
from harness.workloads.lane import Lane
from harness.workloads.lanes import LANES

BUCKETS = ((), (1, 2, 4, 8))


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
            for buckets in BUCKETS:
                got = outcome(lane.run(batch, device=device, batch_buckets=buckets))
                wrong = [ours[0] for ours, theirs in zip(got, expected, strict=True) if ours != theirs]
                if wrong:
                    failures.append(f"{name}, batch_buckets={buckets}: {wrong} differ from the CPU")
    for failure in failures:
        print(failure)  # noqa: T201
    print(f"{len(LANES)} drafters, {len(failures)} differences")  # noqa: T201
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
