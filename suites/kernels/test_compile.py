"""Every kernel compiles for GPUs that are not here, without spilling; every variant of it, too, in the full tier."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from kernels import KERNELS
from kernels.compile import CACHE, TARGETS, Compiled, Job, compile_all, compiled_targets, jobs, objections
from suites.registration import suite

suite(seconds=56, stage="cpu", needs="cpu")

SHARED_LIMIT = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
    "gfx90a": 64 * 1024,
}
"""Bytes of shared memory that one program can have, as the vendors' programming guides give them."""


IN_EVERY_RUN = ("sm_80", "sm_90", "sm_100", "gfx942")


@pytest.fixture(scope="module")
def wanted(tier: str) -> list[Job]:
    return jobs(KERNELS, IN_EVERY_RUN, variants=1) if tier == "fast" else jobs(KERNELS, TARGETS)


@pytest.fixture(scope="module")
def compiled(tier: str) -> list[Compiled]:
    return compile_all(targets=IN_EVERY_RUN, variants=1) if tier == "fast" else compile_all()


def test_everything_compiles_without_spills(compiled: list[Compiled]) -> None:
    assert not (found := objections(compiled)), "\n".join(found)


def test_nothing_is_left_out(compiled: list[Compiled], wanted: list[Job]) -> None:
    assert sorted((result.kernel, result.variant, result.target) for result in compiled) == sorted(wanted)
    assert {kernel for kernel, _, _ in wanted} == set(KERNELS)
    assert {target for _, _, target in wanted} >= set(IN_EVERY_RUN)


def test_the_binaries_were_read(compiled: list[Compiled]) -> None:
    """Also that a program's shared memory fits: compilers leave that to the launch."""
    for result in compiled:
        assert result.registers, f"{result}: no register count"
        assert result.shared is not None, f"{result}: no shared memory"
        assert result.shared <= SHARED_LIMIT[result.target], f"{result}: {result.shared} bytes of shared memory"


def test_a_second_run_compiles_nothing(compiled: list[Compiled]) -> None:
    before = {path: path.stat().st_mtime_ns for path in CACHE.glob("*.json")}
    again = compile_all(["verify_chain_greedy"], IN_EVERY_RUN)
    first = [r for r in compiled if r.kernel == "verify_chain_greedy" and r.target in IN_EVERY_RUN]
    # Another process may have compiled it at the same time, and taken other seconds.
    assert [replace(r, seconds=0.0) for r in again] == [replace(r, seconds=0.0) for r in first]
    assert {path: path.stat().st_mtime_ns for path in CACHE.glob("*.json")} == before


def test_what_was_compiled_is_known(compiled: list[Compiled], tmp_path: Path) -> None:
    assert compiled
    assert set(compiled_targets("verify_chain_greedy")) >= set(IN_EVERY_RUN)
    assert compiled_targets("verify_chain_greedy", cache=tmp_path) == []


def test_a_spill_and_a_failure_are_objected_to() -> None:
    fine = Compiled(kernel="build_tree", variant=0, target="sm_90", registers=20, spills=0, shared=0)
    spilt = dataclasses.replace(fine, spills=8)
    accounted = dataclasses.replace(spilt, kernel="verify_block")
    beyond = dataclasses.replace(accounted, spills=12)
    broken = Compiled(kernel="build_tree", variant=1, target="gfx942", error="CompilationError: no such thing")
    assert objections([fine]) == []
    assert objections([accounted]) == []
    assert "8 spilled, at most 0" in objections([spilt])[0]
    assert "12 spilled, at most 8" in objections([beyond])[0]
    assert "no such thing" in objections([broken])[0]


def test_a_worker_that_dies_is_reported(tmp_path: Path) -> None:
    """Its cache folder is a file, so it cannot keep what it made."""
    (tmp_path / "triton").write_text("")
    with pytest.raises((RuntimeError, AssertionError)):
        assert not objections(compile_all(["verify_chain_greedy"], ["sm_90"], cache=tmp_path))


def test_refuses_unknown_targets() -> None:
    with pytest.raises(ValueError, match="sm_50"):
        compile_all(["verify_chain_greedy"], ["sm_50"])
