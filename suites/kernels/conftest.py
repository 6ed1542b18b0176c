"""Without a CUDA device the kernels run under Triton's interpreter, which it chooses when a kernel file is imported.

The knob, unlike the environment variable of the same meaning, leaves child processes and the engine's own choice alone.
"""

from __future__ import annotations

import pytest
import torch
import triton

if not torch.cuda.is_available():
    triton.knobs.runtime.interpret = True


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
