"""Workflows for GitHub Actions, made from the templates in `workflows/`, the plan of suites and the runner classes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ci import comparison, registry, runners, shards, stages
from ci.shards import Group
from harness.engines import recipes

FOLDER = registry.ROOT / ".github"
ACTIONS = Path(__file__).with_name("actions.toml")
PYTHON = "3.11"
SETUP = 15
"""Minutes that a job has for all but its tests: most of them go into installing torch."""
LABEL = "gpu-approved"
GITHUBS_LABELS = ("self-hosted", "linux", "x64", "arm64")
SERIAL = ("bench", "gpu")
"""Stages whose tests would share a GPU, or measure each other."""
RESULTS = ("build/junit.xml", "build/scorecard.json", "build/reproducers/")


def rendered() -> dict[str, str]:
    """Text of each file by its path below `.github`. Raises ValueError when a suite is not registered as it must be."""
    environment = Environment(
        loader=FileSystemLoader(stages.WORKFLOWS),
        undefined=StrictUndefined,
        autoescape=False,  # YAML
        keep_trailing_newline=True,
        # GitHub has the braces.
        variable_start_string="<<",
        variable_end_string=">>",
        block_start_string="<%",
        block_end_string="%>",
    )
    environment.globals = {**environment.globals, **_facts()}
    names = sorted(path.name for path in stages.WORKFLOWS.glob("*.yml"))
    workflows = {f"workflows/{name}": environment.get_template(name).render().rstrip() + "\n" for name in names}
    return {"actionlint.yaml": _labels(), **workflows}


def _labels() -> str:
    """What actionlint has to know: the labels that are not GitHub's own."""
    labels = (label for one in runners.load().values() if not one.hosted for label in one.labels)
    own = [f"    - {label}" for label in dict.fromkeys(labels) if label not in GITHUBS_LABELS]
    head = ["# Made by `draftproof ci render` from ci/runners.toml.", "self-hosted-runner:", "  labels:"]
    return "\n".join([*head, *own]) + "\n"


def _facts() -> dict[str, Any]:
    classes, known = runners.load(), stages.load()
    groups = shards.groups(registry.must_read(), known)

    def runs_on(needs: str) -> str:
        labels = classes[needs].labels
        return labels[0] if len(labels) == 1 else json.dumps(labels)

    return {
        "actions": tomllib.loads(ACTIONS.read_text(encoding="utf-8")),
        "classes": classes,
        "cpu_group": shards.group_of(groups, "cpu", "cpu"),
        "engines": sorted(recipes()),
        "groups": groups,
        "hosted": runs_on("cpu"),
        "job": job,
        "label": LABEL,
        "marker": comparison.MARKER,
        "python": PYTHON,
        "RESULTS": RESULTS,
        "runs_on": runs_on,
        "SERIAL": SERIAL,
        "SETUP": SETUP,
        "stages": known,
    }


def job(group: Group) -> str:
    """Its name in a workflow."""
    return f"suites-{group.stage}" if group.needs == "cpu" else f"suites-{group.stage}-{group.needs}"


def drifted(texts: Mapping[str, str], folder: Path = FOLDER) -> list[str]:
    """The rendered texts that differ from what lies in a folder, by name. Other files there are let alone."""
    return [
        name
        for name, text in texts.items()
        if not (folder / name).is_file() or (folder / name).read_text(encoding="utf-8") != text
    ]


def write(texts: Mapping[str, str], folder: Path = FOLDER) -> list[str]:
    """Put them into a folder -> the names of those that changed."""
    changed = drifted(texts, folder)
    (folder / "workflows").mkdir(parents=True, exist_ok=True)
    for name in changed:
        (folder / name).write_text(texts[name], encoding="utf-8")
    return changed
