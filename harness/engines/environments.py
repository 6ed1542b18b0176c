"""Environments of engines under test: each engine, and each version of it, has its own, never the harness's.

They lie in `.engines/NAME-VERSION`. A recipe says how one is made; it is part of the engine's adapter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".engines"
STAMP = "installed.json"
TORCH = "torch==2.13.0"
"""Pinned: without a bound, pip takes a build that pulls gigabytes."""
PATIENCE = 120.0
"""Seconds in which a package of an environment must import."""


@dataclass(frozen=True, slots=True)
class Pip:
    """Packages, with what they depend on or without."""

    packages: tuple[str, ...]
    dependencies: bool = True


@dataclass(frozen=True, slots=True)
class RequirementsOf:
    """What an installed package says it depends on, less some; `also` bounds or adds."""

    package: str
    without: tuple[str, ...]
    also: tuple[str, ...] = ()


Step = Pip | RequirementsOf


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the environment of an engine is made. `package`: the distribution whose version counts, or that of the
    first of `others` which is there. `version`: the one that is taken when none is named. `imports` must import in
    it, once `before_imports` has run, as its worker does; `programs`, by name with the command that brings them, must
    be on the path; `variables` is what its process needs in its environment. `here`: the harness's own environment
    has it too, in that version, and serves where no other is named."""

    engine: str
    package: str
    version: str
    steps: Callable[[str], tuple[Step, ...]]
    imports: tuple[str, ...]
    before_imports: str = ""
    others: tuple[str, ...] = ()
    programs: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    here: bool = False

    def folder(self, version: str) -> Path:
        return FOLDER / f"{self.engine}-{version}"

    def trial(self, python: Path, module: str) -> list[str]:
        """The command that shows whether a module imports."""
        return [str(python), "-s", "-c", f"{self.before_imports}\nimport {module}"]

    def installed(self) -> dict[str, Path]:
        """Python of each version that has been installed to the end."""
        stamps = sorted(FOLDER.glob(f"{self.engine}-*/{STAMP}"))
        return {stamp.parent.name.removeprefix(f"{self.engine}-"): stamp.parent / "bin" / "python" for stamp in stamps}

    def python(self, where: str = "") -> Path:
        """Python of a version, of an environment of the user's own (a path), or of the recipe's version. Raises
        ValueError with the command that mends it when there is none."""
        if "/" in where:
            if not Path(where).is_file():
                raise ValueError(f"engine={self.engine}@{where}: there is no such file; name a Python interpreter")
            return Path(where).absolute()  # not resolved: a virtual environment is known by its link
        version = where or self.version
        if self.here and version == self.version:
            return Path(sys.executable)
        found = self.installed().get(version)
        if found is None:
            raise ValueError(
                f"engine={self.engine}: {version} is not installed here; draftproof engines install {self.engine} "
                f"{version}, or --engine-python PATH of an environment that has it"
            )
        return found


@dataclass(frozen=True, slots=True)
class Ailment:
    """What is missing, and what to do."""

    what: str
    mend: str


def doctor(recipe: Recipe, where: str = "") -> Iterator[Ailment]:
    """What keeps an engine from being tested here."""
    install = f"draftproof engines install {recipe.engine} {where if where and '/' not in where else recipe.version}"
    for program, command in recipe.programs.items():
        if shutil.which(program) is None:
            yield Ailment(f"{program} is not on the path", command)
    try:
        python = recipe.python(where)
    except ValueError as error:
        yield Ailment(str(error).partition(";")[0], install)
        return
    for module in recipe.imports:
        code, said = _run(recipe.trial(python, module), recipe.variables, PATIENCE)
        if code:
            last = said.strip().splitlines()[-1:] or ["no word why"]
            yield Ailment(f"{python}: `import {module}` fails: {last[0]}", install)


def version_of(recipe: Recipe, python: Path) -> str:
    """The engine's version in an environment; empty when it is not there."""
    for package in (recipe.package, *recipe.others):
        code, said = _run([str(python), "-s", "-c", _VERSION.format(package=package)], {}, PATIENCE)
        if not code and said.strip():
            return said.strip().splitlines()[-1]
    return ""


_VERSION = "from importlib.metadata import version; print(version({package!r}))"
_REQUIREMENTS = "import json; from importlib.metadata import requires; print(json.dumps(requires({package!r}) or []))"


def install(recipe: Recipe, version: str, say: Callable[[str], None], python: str = sys.executable) -> Path:
    """Make the environment of a version, step by step, unless it is there; what a broken-off attempt has left is used.
    Raises RuntimeError with the last lines of pip when a step fails."""
    if recipe.here and version == recipe.version:
        say(f"{recipe.engine} {version} is there: it is in this environment")
        return Path(sys.executable)
    folder = recipe.folder(version)
    if (folder / STAMP).is_file() and json.loads((folder / STAMP).read_text(encoding="utf-8")) == _stamp(
        recipe, version
    ):
        say(f"{recipe.engine} {version} is there: {folder}")
        return folder / "bin" / "python"
    log = folder / "install.log"
    steps = recipe.steps(version)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STAMP).unlink(missing_ok=True)
    started = monotonic()
    say(f"[0/{len(steps)}] a virtual environment in {folder}")
    inside = folder / "bin" / "python"
    if not inside.exists() or _run([str(inside), "-m", "pip", "--version"], {}, PATIENCE)[0]:
        _must([python, "-m", "venv", str(folder)], log)
    for number, step in enumerate(steps, start=1):
        arguments = _arguments(step, inside)
        shown = (
            " ".join(arguments) if len(arguments) < 8 else f"{' '.join(arguments[:6])} and {len(arguments) - 6} more"
        )
        say(f"[{number}/{len(steps)}] pip install {shown}  ({monotonic() - started:.0f} s so far)")
        _must([str(inside), "-m", "pip", "install", "--disable-pip-version-check", *arguments], log)
    for module in recipe.imports:
        say(f"trying it: import {module}")
        code, said = _run(recipe.trial(inside, module), recipe.variables, PATIENCE)
        if code:
            raise RuntimeError(f"{recipe.engine} {version} is installed and `import {module}` fails:\n{_tail(said)}")
    (folder / STAMP).write_text(json.dumps(_stamp(recipe, version)), encoding="utf-8")
    say(
        f"{recipe.engine} {version} is ready after {monotonic() - started:.0f} s: draftproof run --engine "
        f"{recipe.engine}@{version}"
    )
    return inside


def newest(recipe: Recipe) -> str:
    """The newest version of an engine that can be installed here. Raises RuntimeError with pip's last lines."""
    asked = ["install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed", "--report", "-", recipe.package]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *asked],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"pip finds no {recipe.package}:\n{_tail(done.stderr)}")
    return str(json.loads(done.stdout)["install"][0]["metadata"]["version"])


def _stamp(recipe: Recipe, version: str) -> dict[str, str]:
    """By what an environment is known to be whole, and made by this recipe."""
    made = {"engine": recipe.engine, "version": version, "steps": str(recipe.steps(version))}
    return made | {"imports": " ".join(recipe.imports)}


def _arguments(step: Step, python: Path) -> list[str]:
    if isinstance(step, Pip):
        return [*([] if step.dependencies else ["--no-deps"]), *step.packages]
    code, said = _run([str(python), "-s", "-c", _REQUIREMENTS.format(package=step.package)], {}, PATIENCE)
    if code:
        raise RuntimeError(f"{step.package} does not tell what it depends on:\n{_tail(said)}")
    wanted = json.loads(said.strip().splitlines()[-1])
    return [*(one for one in wanted if _name(one) not in step.without and "extra ==" not in one), *step.also]


def _name(requirement: str) -> str:
    """The distribution that a requirement names, as package indexes spell it."""
    end = next((at for at, letter in enumerate(requirement) if not (letter.isalnum() or letter in "._-")), None)
    return requirement[:end].lower().replace("_", "-").replace(".", "-")


def _must(command: list[str], log: Path) -> None:
    with log.open("a", encoding="utf-8") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ... failed:\n{_tail(log.read_text(encoding='utf-8'))}\nall: {log}")


def _run(command: list[str], variables: Mapping[str, str], patience: float) -> tuple[int, str]:
    """Exit code and everything written; a hang is a failure."""
    # Not from the checkout: its folder `kernels` would stand for a package of that name.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(variables)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=patience, check=False, env=environment, cwd="/"
        )
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {patience:g} s"
    return done.returncode, done.stdout + done.stderr


def _tail(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.strip().splitlines()[-12:])
