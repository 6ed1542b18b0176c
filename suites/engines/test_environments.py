"""Environments of engines: what is missing is named with the command that mends it; what was broken off is not taken
for whole."""

from __future__ import annotations

import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import app
from harness.engines import engine_factory, environments, recipes
from harness.engines.environments import Pip, Recipe, doctor, install, newest, version_of
from suites.registration import suite

suite(seconds=13, stage="cpu", needs="cpu")

TOY = Recipe(engine="toy", package="pip", version="1.0", steps=lambda _: (), imports=("json",))
"""Nothing but a virtual environment, so that nothing is downloaded."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One folder for all: a virtual environment takes seconds, and is made once."""
    monkeypatch.setattr(environments, "FOLDER", folder)


def test_an_environment_is_made_and_found(folder: Path) -> None:
    said: list[str] = []
    python = install(TOY, "1.0", said.append)
    assert python == folder / "toy-1.0" / "bin" / "python"
    assert TOY.installed() == {"1.0": python}
    assert TOY.python() == TOY.python("1.0") == python
    assert not list(doctor(TOY))
    assert version_of(TOY, python)
    assert said[0].startswith("[0/0] a virtual environment")
    assert "draftproof run --engine toy@1.0" in said[-1]
    said.clear()
    assert install(TOY, "1.0", said.append) == python
    assert said == [f"toy 1.0 is there: {folder / 'toy-1.0'}"]


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (replace(TOY, steps=lambda _: (Pip(("--no-such-option",)),)), "no such option"),
        (replace(TOY, imports=("no_such_module",)), "No module named 'no_such_module'"),
    ],
    ids=["step", "import"],
)
def test_a_failure_is_told_and_leaves_nothing_that_looks_whole(broken: Recipe, told: str) -> None:
    install(TOY, "1.0", lambda _: None)
    with pytest.raises(RuntimeError, match=told):
        install(broken, "1.0", lambda _: None)
    assert TOY.installed() == {}
    with pytest.raises(ValueError, match=r"draftproof engines install toy 1\.0"):
        TOY.python()


def test_the_doctor_names_what_is_missing_and_its_mend() -> None:
    sick = replace(TOY, programs={"no-such-program": "apt-get install no-such-program"}, imports=("no_such_module",))
    program, module = doctor(sick, sys.executable)
    assert (program.what, program.mend) == ("no-such-program is not on the path", "apt-get install no-such-program")
    assert "No module named 'no_such_module'" in module.what
    assert module.mend == "draftproof engines install toy 1.0"
    (nothing,) = doctor(TOY, "3.0")
    assert "3.0 is not installed" in nothing.what
    assert nothing.mend == "draftproof engines install toy 3.0"


def test_a_python_of_the_users_own_must_be_there() -> None:
    assert TOY.python(sys.executable) == Path(sys.executable)
    with pytest.raises(ValueError, match="there is no such file"):
        TOY.python("/no/such/python")


def index(folder: Path, *versions: str) -> None:
    """Wheels of an empty package `toy-engine`, which pip takes for all that can be had."""
    for version in versions:
        with zipfile.ZipFile(folder / f"toy_engine-{version}-py3-none-any.whl", "w") as wheel:
            place = f"toy_engine-{version}.dist-info"
            wheel.writestr(f"{place}/METADATA", f"Metadata-Version: 2.1\nName: toy-engine\nVersion: {version}\n")
            wheel.writestr(f"{place}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{place}/RECORD", "")


def test_the_newest_version_is_that_of_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    toy = replace(TOY, package="toy-engine")
    with pytest.raises(RuntimeError, match="pip finds no toy-engine"):
        newest(toy)
    index(tmp_path, "0.9", "0.31.0", "0.32.0rc1", "0.4")
    assert newest(toy) == "0.31.0"


@pytest.mark.parametrize("name", [name for name, recipe in recipes().items() if not recipe.here])
def test_what_is_not_installed_is_named_before_anything_runs(name: str) -> None:
    with pytest.raises(ValueError, match=f"draftproof engines install {name}"):
        engine_factory(name)
    assert recipes()[name].engine == name


def test_what_our_own_environment_has_is_taken_from_there_and_other_versions_are_not(folder: Path) -> None:
    own = replace(TOY, here=True)
    said: list[str] = []
    assert own.python() == own.python("1.0") == install(own, "1.0", said.append) == Path(sys.executable)
    assert said == ["toy 1.0 is there: it is in this environment"]
    assert list(doctor(own)) == []
    with pytest.raises(ValueError, match=r"draftproof engines install toy 2\.0"):
        own.python("2.0")
    assert install(own, "2.0", said.append) == own.python("2.0") == folder / "toy-2.0" / "bin" / "python"


def test_an_engine_of_our_own_environment_has_one_version() -> None:
    with pytest.raises(ValueError, match="the one version that it has"):
        engine_factory("reference@2.0")


def test_the_commands() -> None:
    runner = CliRunner()
    listed = runner.invoke(app, ["engines", "list"])
    told = {line.split()[0]: line for line in listed.output.splitlines()}
    assert {"reference", "transformers", "vllm", "openai"} <= set(told)
    assert told["transformers"].split()[2:5] == ["in", "this", "environment"]
    sick = runner.invoke(app, ["engines", "doctor", "vllm"])
    assert sick.exit_code == 1
    assert "mend: draftproof engines install vllm" in sick.output
    well = runner.invoke(app, ["engines", "doctor", "reference"])
    assert (well.exit_code, well.output) == (0, "reference runs in this environment: nothing is missing\n")
    assert "nothing to install" in runner.invoke(app, ["engines", "install", "reference"]).output
    assert runner.invoke(app, ["engines", "doctor", "nobody"]).exit_code == 2
    served = runner.invoke(app, ["engines", "doctor", "openai@no-such.toml"])
    assert (served.exit_code, "docs/servers.md" in served.output) == (1, True)
