"""Each kernel at a small size: its torch reference on a CPU, compiled on a GPU (`ci/gpu_bench.py` has large ones)."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from ci.gpu_cases import CASES
from ci.perf.workloads import KERNEL_SIZES
from kernels import KERNELS
from suites.registration import suite

suite(seconds=30, stage="bench", needs="cpu")

pytestmark = pytest.mark.perf


@pytest.mark.parametrize("name", CASES)
def test_kernel(benchmark: BenchmarkFixture, name: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = CASES[name].build(KERNEL_SIZES, device)
    call = KERNELS[name].call

    def work() -> None:
        call(*given.args, **given.kwargs, backend="triton" if device.type == "cuda" else "torch")
        if device.type == "cuda":
            torch.cuda.synchronize()

    benchmark.extra_info["bytes"] = given.nbytes
    benchmark(work)
