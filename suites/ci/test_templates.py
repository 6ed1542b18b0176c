"""Templates of other fronts: they parse, and a job gets one GPU, one pod, and no right over anything else."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from ci.cli import app
from ci.runners import load
from suites.registration import suite

suite(seconds=0.1, stage="cpu", needs="cpu")

TEMPLATES = Path(__file__).resolve().parents[2] / "ci" / "templates"
YAML = sorted(path.name for path in TEMPLATES.glob("*.yaml"))
UNITS = sorted(path.name for path in TEMPLATES.glob("*.service"))
LONGEST_STAGE = 240 * 60


def read(name: str) -> Any:
    return yaml.safe_load((TEMPLATES / name).read_text())


def pods(value: Any) -> Iterator[dict[str, Any]]:
    """Every mapping that lists containers."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for inner in value.values():
            yield from pods(inner)


def unit(name: str) -> ConfigParser:
    parser = ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names of systemd keep their case
    parser.read(TEMPLATES / name)
    return parser


def test_there_is_one_for_each_front() -> None:
    assert YAML == ["kubernetes-buildkite.yaml", "kubernetes-github.yaml"]
    assert UNITS == ["buildkite-agent.service", "github-runner.service"]


@pytest.mark.parametrize("name", YAML)
def test_a_pod_has_one_gpu_and_no_right_over_the_cluster(name: str) -> None:
    (pod,) = pods(read(name))
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(pod)
    assert all("hostPath" not in volume for volume in pod.get("volumes", ()))
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"cpu", "memory"} <= set(container["resources"]["limits"])
    own = container["securityContext"]
    assert own["allowPrivilegeEscalation"] is False
    assert own["privileged"] is False
    assert own["capabilities"]["drop"] == ["ALL"]
    assert re.fullmatch(r"REGISTRY/[a-z-]+@sha256:DIGEST", container["image"])


def test_a_pod_of_github_takes_the_jobs_of_a_class_and_ends() -> None:
    values = read("kubernetes-github.yaml")
    assert tuple(values["scaleSetLabels"]) == load()["1-gpu"].labels
    assert values["minRunners"] == 0
    assert isinstance(values["githubConfigSecret"], str)
    assert values["template"]["spec"]["activeDeadlineSeconds"] > LONGEST_STAGE


def test_a_pod_of_buildkite_takes_the_jobs_of_a_class_and_ends() -> None:
    values = read("kubernetes-buildkite.yaml")
    (tag,) = values["config"]["tags"]
    assert tag.removeprefix("queue=") in load()["1-gpu"].labels
    assert values["config"]["prohibit-kubernetes-plugin"] is True
    assert values["config"]["job-active-deadline-seconds"] > LONGEST_STAGE
    assert values["config"]["pod-spec-patch"]["restartPolicy"] == "Never"
    assert isinstance(values["agentStackSecret"], str)


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_takes_one_job_at_a_time_and_starts_again(name: str) -> None:
    service = unit(name)["Service"]
    assert service["Restart"] == "always"
    assert service["NoNewPrivileges"] == "yes"
    assert service["KillMode"] in ("mixed", "control-group")
    assert not re.search(r"token[= ][A-Za-z0-9]", service["ExecStart"].lower())


def test_the_unit_of_buildkite_ends_its_agent_after_a_job() -> None:
    words = shlex.split(unit("buildkite-agent.service")["Service"]["ExecStart"])
    assert "--disconnect-after-job" in words
    queue = words[words.index("--tags") + 1].removeprefix("queue=")
    assert queue in load()["1-gpu"].labels


def test_the_unit_of_github_is_a_command_that_there_is() -> None:
    service = unit("github-runner.service")["Service"]
    words = shlex.split(service["ExecStart"])
    group = typer.main.get_command(app)
    assert words[1:3] == ["ci", "register-runner"]
    command = group.commands["register-runner"]  # type: ignore[attr-defined]  # a group, since it has several commands
    context = command.make_context("register-runner", words[3:])
    assert context.params["user"] == "runner"
    assert str(context.params["token_file"]) == "${CREDENTIALS_DIRECTORY}/token"
    assert service["LoadCredential"].startswith("token:")


@pytest.mark.parametrize("name", [*YAML, *UNITS])
def test_no_template_holds_a_secret(name: str) -> None:
    text = (TEMPLATES / name).read_text()
    assert not re.search(r"gh[pousr]_\w{10}|github_pat_|BEGIN [A-Z ]*PRIVATE KEY|bkct_|bkua_", text)
