"""What a machine is, which runner classes it satisfies, and why not the others."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ci import doctor, runners
from ci.cli import app
from ci.doctor import GIB, Gpu, Machine
from suites.registration import suite

suite(seconds=0.3, stage="cpu", needs="cpu")

CLASSES = runners.load()
H200 = Machine(
    system="linux",
    processor="x86_64",
    cpus=16,
    gpus=(Gpu(vendor="nvidia", name="NVIDIA H200", architecture="sm_90", memory_bytes=139 * GIB),),
    driver="575.57.08",
    cuda="12.9",
    torch="2.13.0",
    triton="3.9.0",
)
MI300X = replace(
    H200,
    gpus=(Gpu(vendor="amd", name="AMD Instinct MI300X", architecture="gfx942", memory_bytes=191 * GIB),),
    driver="6.14.14",
    cuda="7.0.51831",
)
BARE = Machine(system="linux", processor="x86_64", cpus=2, torch="2.13.0+cpu")


def smaller(machine: Machine, architecture: str, gib: int) -> Machine:
    return replace(machine, gpus=(replace(machine.gpus[0], architecture=architecture, memory_bytes=gib * GIB),))


@pytest.mark.parametrize(
    ("machine", "names"),
    [
        (H200, ["cpu", "1-gpu", "1-gpu-large", "hopper"]),
        (smaller(H200, "sm_90", 16), ["cpu", "1-gpu"]),
        (smaller(H200, "sm_100", 178), ["cpu", "1-gpu", "1-gpu-large", "blackwell"]),
        (smaller(H200, "sm_89", 22), ["cpu", "1-gpu"]),
        (smaller(H200, "sm_75", 15), ["cpu"]),
        (MI300X, ["cpu", "amd"]),
        (BARE, ["cpu"]),
        (replace(BARE, system="darwin"), []),
    ],
)
def test_a_machine_satisfies_the_classes_whose_work_it_can_do(machine: Machine, names: list[str]) -> None:
    assert [one.name for one in doctor.satisfied(machine, CLASSES)] == names


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (BARE, "no nvidia GPU is here"),
        (MI300X, "AMD Instinct MI300X is not of nvidia"),
        (smaller(H200, "sm_100", 139), "NVIDIA H200 is sm_100, not one of sm_90"),
        (smaller(H200, "sm_90", 71), "NVIDIA H200 has 71.0 GiB, 78 are wanted"),
        (replace(H200, driver="470.256.02"), "driver 470.256.02 is not >=525"),
        (replace(H200, driver=""), "driver unknown is not >=525"),
        (replace(H200, cuda="11.8"), "CUDA 11.8 is not >=12.0,<14"),
        (replace(H200, cuda="14.0"), "CUDA 14.0 is not >=12.0,<14"),
        (replace(H200, triton=""), "triton is not installed"),
        (replace(H200, trouble="torch cannot use it"), "torch cannot use it"),
    ],
)
def test_what_keeps_a_machine_from_a_class_is_said(machine: Machine, reason: str) -> None:
    assert doctor.unmet(machine, CLASSES["hopper"]) == (reason,)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Put a program of that name on the path which answers so, as one does where torch sees no GPU."""

    def install(answer: str, code: int) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '%s\\n' '{answer}'\nexit {code}\n", encoding="utf-8")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here, and is asked first")
def test_a_gpu_that_torch_cannot_use_is_listed_and_the_trouble_told(
    nvidia_smi: Callable[[str, int], None],
) -> None:
    nvidia_smi("NVIDIA H100 80GB HBM3, 9.0, 81559, 550.54.15", 0)
    machine = doctor.detect()
    assert [(one.name, one.architecture) for one in machine.gpus] == [("NVIDIA H100 80GB HBM3", "sm_90")]
    assert machine.gpus[0].memory_bytes == 81559 * 2**20
    assert machine.driver == "550.54.15"
    assert torch.__version__ in machine.trouble
    assert machine.trouble in doctor.unmet(machine, CLASSES["1-gpu"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here, and is asked first")
def test_a_driver_that_does_not_answer_is_no_gpu(nvidia_smi: Callable[[str, int], None]) -> None:
    nvidia_smi("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.", 9)
    assert doctor.detect().gpus == ()


def test_doctor_says_what_this_machine_is() -> None:
    told = CliRunner().invoke(app, ["doctor", "--json"])
    machine = json.loads(told.stdout)
    assert machine["torch"] == torch.__version__
    assert machine["cpus"] == os.cpu_count()
    assert list(machine["classes"]) == list(CLASSES)
    assert len(machine["gpus"]) == torch.cuda.device_count()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine may be of that class")
def test_doctor_fails_where_a_class_is_required_and_not_satisfied() -> None:
    assert CliRunner().invoke(app, ["doctor", "--require", "cpu"]).exit_code == 0
    told = CliRunner().invoke(app, ["doctor", "--require", "hopper"])
    assert told.exit_code == 1
    assert "no nvidia GPU is here" in told.stdout


GOOD = 'title = "t"\nlabels = ["self-hosted", "x"]\nbaseline = "b"\n'


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (GOOD.replace('"self-hosted", ', ""), 'labels lack "self-hosted"'),
        ('title = "t"\nlabels = []\nhosted = true\nbaseline = "b"', r"labels=\[\]: a job must ask for a label"),
        (GOOD + 'vendor = "nvidia"', "vendor and architectures go together"),
        (GOOD + 'driver = "525 or later"', "driver='525 or later': write bounds as pip does"),
        (GOOD + "speed = 3", "unknown field `speed`"),
        (GOOD + 'vendor = "intel"', "Invalid enum value 'intel'"),
        ("title =", "Invalid value"),
    ],
)
def test_a_class_that_makes_no_sense_is_refused(tmp_path: Path, entry: str, message: str) -> None:
    file = tmp_path / "runners.toml"
    file.write_text(f"[some]\n{entry}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        runners.load(file)
