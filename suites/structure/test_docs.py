"""What the pages name is there: paths, links and commands, written one way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engines import ENGINES
from suites.registration import suite

suite(seconds=0.3, stage="cpu", needs="cpu")

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN = ("build/", ".venv/", ".engines/", "traces/", "runs/")
"""Folders that commands make."""
SOURCES = (".py", ".sh", ".yml", ".yaml", ".service", ".jinja", ".md")
"""Endings of files that no command writes for its user: whoever names one tells where it is."""

BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```$|^((?: {4}[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
OURS = re.compile(r"(?<![\w./-])(?:ci|docs|harness|suites|kernels|reference_engine)/[\w./-]*\w")
BLANK = re.compile(r"\b[A-Z]{4,}\b")
"""What the reader fills in."""
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")


def prose(text: str) -> str:
    return BLOCK.sub("", text)


def paths(text: str) -> Iterator[str]:
    """What stands in backticks and is a path of this repository. One of an engine's own source is `vllm: v1/x.py`, a
    capital word stands for what the reader fills in, and files of the reader's own are called my-something."""
    for word in re.findall(r"`([^`\n]+)`", prose(text)):
        path = word.partition("::")[0]
        if not PATH.fullmatch(path) or BLANK.search(path) or path.startswith(("my", *WRITTEN)):
            continue
        if "/" in path or path.endswith(SOURCES):
            yield path


def paths_in_blocks(text: str) -> list[str]:
    named = [path for match in BLOCK.finditer(text) for path in OURS.findall(match[0])]
    return [path for path in named if not BLANK.search(path)]


def is_there(path: str) -> bool:
    return any(True for _ in ROOT.glob(path.rstrip("/")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = {path for path in (*paths(text), *paths_in_blocks(text)) if not is_there(path)}
    targets = re.findall(r"\]\((?!https?://)([^)#]+)[^)]*\)", prose(text))
    assert not missing, "give paths from the root of the repository; those of an engine's source as `vllm: v1/x.py`"
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_of_engines_are_told_apart(page: Path) -> None:
    """By the name of the engine before them, and of no other."""
    named = re.findall(r"`([^`\n:]+): ([^`\n]+\.(?:py|cpp|h))`", prose(page.read_text(encoding="utf-8")))
    assert {engine for engine, _ in named} <= set(ENGINES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_can_be_pasted(page: Path) -> None:
    """In a block they begin with where `make install` puts them; in a sentence the bare word is the name."""
    text = page.read_text(encoding="utf-8")
    lines = [line.strip() for match in BLOCK.finditer(text) for line in (match[1] or match[2]).splitlines()]
    assert [line for line in lines if line.startswith(("draftproof ", "pytest "))] == []


def test_every_step_of_the_installation_says_what_it_does() -> None:
    """One line each, before it falls silent for minutes."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    silent = []
    for number, line in enumerate(lines):
        if line.startswith("\t@$(PIP)") and not lines[number - 1].startswith(("\t@echo", "\t@$(PIP)")):
            silent.append(line)
    assert not silent
    assert not [line for line in lines if "pip install" in line and not line.startswith("PIP :=")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`servers/vllm.toml`, `harness/engines/`", ["servers/vllm.toml", "harness/engines/"]),
        ("`forms.py` and `suites/**/test_*.py::test_x`", ["forms.py", "suites/**/test_*.py"]),
        ("`vllm: v1/x.py` `build/report.html` `my/x.py` `OWNER/NAME` `scorecard.json` `a / b`", []),
        ("```\n`gone/x.py`\n```\n    `gone/y.py`\n", []),
    ],
)
def test_what_is_taken_for_a_path(text: str, found: list[str]) -> None:
    assert list(paths(text)) == found
