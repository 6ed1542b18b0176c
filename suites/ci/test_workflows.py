"""The workflows are those that the registrations ask for, and safe for a public repository."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ci import render, runners, shards, stages
from ci.cli import app
from ci.registry import Registration
from suites.ci.rules import Workflow, events, objections, parsed
from suites.registration import suite

suite(seconds=2.1, stage="cpu", needs="cpu")

PROGRAMS = Path(sys.executable).parent
NAMES = ("ci", "comparison", "engines", "gpu", "nightly")


@pytest.fixture(scope="session")
def workflows(rendered: dict[str, str]) -> dict[str, Workflow]:
    return {Path(name).stem: parsed(text) for name, text in rendered.items() if name.startswith("workflows/")}


def test_what_is_checked_in_is_what_is_rendered(rendered: dict[str, str]) -> None:
    assert render.drifted(rendered) == [], "draftproof ci render"


def test_a_file_that_has_drifted_is_named_and_rendered_again(rendered: dict[str, str], tmp_path: Path) -> None:
    assert {Path(name).stem for name in render.write(rendered, tmp_path)} == {*NAMES, "actionlint"}
    gpu = tmp_path / "workflows" / "gpu.yml"
    text = gpu.read_text(encoding="utf-8")
    gpu.write_text(text.replace("needs: [gate]", ""), encoding="utf-8")
    (tmp_path / "workflows" / "ci.yml").unlink()
    (tmp_path / "workflows" / "release.yml").write_text("name: somebody else's\n", encoding="utf-8")
    assert render.drifted(rendered, tmp_path) == ["workflows/ci.yml", "workflows/gpu.yml"]
    told = CliRunner().invoke(app, ["render", "--check", "--folder", str(tmp_path)])
    assert told.exit_code == 1
    assert "workflows/gpu.yml is not as it would be rendered: draftproof ci render" in told.stdout
    assert render.write(rendered, tmp_path) == ["workflows/ci.yml", "workflows/gpu.yml"]
    assert gpu.read_text(encoding="utf-8") == text


def test_every_shard_of_the_plan_has_a_job(
    workflows: dict[str, Workflow], registrations: tuple[Registration, ...]
) -> None:
    known, classes = stages.load(), runners.load()
    for group in shards.groups(registrations, known):
        job = workflows[known[group.stage].workflow]["jobs"][render.job(group)]
        count = len(group.shards)
        assert job["strategy"]["matrix"]["shard"] == list(range(1, count + 1))
        labels = job["runs-on"] if isinstance(job["runs-on"], list) else [job["runs-on"]]
        assert labels == list(classes[group.needs].labels)
        (step,) = [step for step in job["steps"] if "--shard" in step.get("run", "")]
        assert f'--stage {group.stage} --needs {group.needs} --shard "$SHARD/{count}"' in step["run"]
        assert all(option in step["run"] for option in known[group.stage].options)
        assert step["timeout-minutes"] == known[group.stage].minutes
        assert step["timeout-minutes"] < job["timeout-minutes"]


def test_a_stage_that_runs_is_rendered(workflows: dict[str, Workflow]) -> None:
    for name, stage in stages.load().items():
        assert f"--stage {name} " in str(workflows[stage.workflow]), name


def test_every_engine_has_a_lane_of_its_pinned_and_of_its_newest_version(workflows: dict[str, Workflow]) -> None:
    jobs = workflows["engines"]["jobs"]
    for job in ("pinned", "latest"):
        assert jobs[job]["strategy"]["matrix"]["engine"] == ["llama.cpp", "sglang", "transformers", "vllm"]


def test_the_last_job_of_ci_waits_for_all_that_a_pull_request_needs(workflows: dict[str, Workflow]) -> None:
    jobs = workflows["ci"]["jobs"]
    assert {*jobs["passed"]["needs"], "passed", "estimates"} == set(jobs)
    assert jobs["passed"]["if"] == "always()"


@pytest.mark.parametrize("name", NAMES)
def test_no_rule_is_broken(workflows: dict[str, Workflow], name: str) -> None:
    assert objections(workflows[name]) == []


def test_jobs_that_may_write_do_so_for_pull_requests_only(workflows: dict[str, Workflow]) -> None:
    writing = {
        (name, job_name, scope)
        for name, workflow in workflows.items()
        for job_name, job in workflow["jobs"].items()
        for scope, access in job["permissions"].items()
        if access == "write"
    }
    assert writing == {("gpu", "withdraw", "pull-requests"), ("comparison", "comment", "pull-requests")}


def first_step(job: dict[str, Any], what: str) -> dict[str, Any]:
    found: dict[str, Any] = next(step for step in job["steps"] if what in str(step.get("uses", step.get("run"))))
    return found


def drop(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda job: job.pop(name)


@pytest.mark.parametrize(
    ("broken", "objection"),
    [
        (lambda job: first_step(job, "upload").update(uses="actions/upload-artifact@v7"), "not pinned by a commit"),
        (lambda job: first_step(job, "checkout")["with"].pop("persist-credentials"), "leaves the token"),
        (lambda job: first_step(job, "setup-python")["with"].update(cache="pip"), "poison"),
        (lambda job: first_step(job, "make").update(run="echo ${{ github.event.pull_request.title }}"), "in env"),
        (drop("timeout-minutes"), "has no timeout-minutes"),
        (drop("permissions"), "has no permissions"),
        (lambda job: job["permissions"].update(contents="write"), "checks out code although it may write"),
        (lambda job: job["permissions"].update(contents="write"), "may write on a machine of ours"),
        (drop("needs"), "without the gate"),
        (lambda job: job.update({"if": "github.event.label.name == 'gpu-approved'"}), "without the gate"),
        (lambda job: first_step(job, "checkout")["with"].update(ref="${{ github.head_ref }}"), "another commit"),
        (lambda job: job["steps"].append({"run": "true", "env": {"KEY": "${{ secrets.KEY }}"}}), "name secrets"),
    ],
)
def test_a_broken_rule_is_seen(
    rendered: dict[str, str], broken: Callable[[dict[str, Any]], object], objection: str
) -> None:
    workflow = parsed(rendered["workflows/gpu.yml"])
    broken(workflow["jobs"]["suites-gpu-1-gpu"])
    assert any(objection in line for line in objections(workflow))


def test_rules_of_whole_workflows_are_seen_too(rendered: dict[str, str]) -> None:
    workflow = parsed(rendered["workflows/gpu.yml"])
    workflow[True]["pull_request"] = None
    del workflow["permissions"], workflow["concurrency"]
    assert "pull_request" in events(workflow)
    found = "\n".join(objections(workflow))
    for objection in ("permissions: must be {}", "concurrency: has no group", "that a fork can change or cause"):
        assert objection in found


def linted(program: str, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(PROGRAMS / program), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


ZIZMOR = ("--offline", "--persona=pedantic", "--no-progress", "--color=never")
SCHEMA = ("--builtin-schema", "vendor.github-workflows")


def test_zizmor_finds_nothing() -> None:
    code, said = linted("zizmor", *ZIZMOR, str(render.FOLDER / "workflows"))
    assert code == 0, said
    assert "No findings to report" in said


def test_the_workflows_fit_their_schema() -> None:
    code, said = linted("check-jsonschema", *SCHEMA, *map(str, (render.FOLDER / "workflows").glob("*.yml")))
    assert code == 0, said


def test_zizmor_sees_an_injection(rendered: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "ci.yml"
    injected = "run: echo ${{ github.event.pull_request.title }}"
    file.write_text(rendered["workflows/ci.yml"].replace("run: make style plan", injected), encoding="utf-8")
    code, said = linted("zizmor", *ZIZMOR, str(file))
    assert code != 0
    assert "template-injection" in said


def test_the_schema_sees_a_field_of_another_kind(rendered: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "ci.yml"
    text = rendered["workflows/ci.yml"].replace("timeout-minutes: 20", "timeout-minutes: soon")
    file.write_text(text, encoding="utf-8")
    code, said = linted("check-jsonschema", *SCHEMA, str(file))
    assert code != 0
    assert "soon" in said
