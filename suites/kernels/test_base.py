"""Which backend is taken, and what a row of the registry must say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import KERNELS
from kernels.base import Choice, Kernel, choose_backend, interpreted
from suites.kernels.guard import DEVICE
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")
suite(seconds=10, stage="gpu", needs="1-gpu")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("choice", "device", "variable", "expected"),
    [
        ("auto", CPU, None, "torch"),
        ("auto", CPU, "1", "triton"),
        ("auto", CUDA, None, "triton"),
        ("torch", CPU, "1", "torch"),
        ("torch", CUDA, None, "torch"),
        ("triton", CUDA, None, "triton"),
        ("triton", CPU, "1", "triton"),
    ],
)
def test_backend(
    choice: Choice, device: torch.device, variable: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the references, unless the environment asks for the interpreter."""
    if variable is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", variable)
    assert choose_backend(choice, device) == expected


def test_the_test_session_interprets() -> None:
    """Without that being an engine's default; who asks for Triton by name gets it."""
    assert interpreted() == (DEVICE.type == "cpu")
    assert choose_backend("triton", DEVICE) == "triton"


def test_triton_needs_a_device_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.base.interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"kernels='triton': device cpu cannot run Triton.*TRITON_INTERPRET=1"):
        choose_backend("triton", CPU)


def test_refuses_an_unknown_backend() -> None:
    choice: Any = "cuda"
    with pytest.raises(ValueError, match="kernels='cuda': must be 'auto', 'torch' or 'triton'"):
        choose_backend(choice, CPU)


@pytest.mark.parametrize("spills", [{"spills": "why"}, {"spill_limit": 8}])
def test_spills_are_accepted_with_a_bound_and_a_reason(spills: dict[str, Any]) -> None:
    row = KERNELS["fill_bonus_tokens"]
    with pytest.raises(ValueError, match="fill_bonus_tokens: spill_limit="):
        Kernel(
            name=row.name,
            shapes=row.shapes,
            call=row.call,
            reference=row.reference,
            variants=row.variants,
            properties=row.properties,
            **spills,
        )
