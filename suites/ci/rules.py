"""What every workflow of a public repository has to keep to, beyond what linters ask."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

Workflow = dict[Any, Any]
PINNED = re.compile(r"[\w./-]+@[0-9a-f]{40}")
FOREIGN = ("pull_request", "pull_request_target", "workflow_run")
"""Events that somebody who may not write can cause."""
GATE = "needs.gate.outputs.approved == 'true'"


def parsed(text: str) -> Workflow:
    found: Workflow = yaml.safe_load(text)
    return found


def events(workflow: Workflow) -> set[str]:
    # To YAML 1.1 the key `on` is a boolean.
    return set(workflow[True])


def objections(workflow: Workflow) -> list[str]:
    """What breaks a rule, a line each."""
    found = []
    if workflow.get("permissions") != {}:
        found.append("permissions: must be {} at the top, so that each job names its own")
    if "group" not in workflow.get("concurrency", {}):
        found.append("concurrency: has no group")
    if "secrets" in str(workflow["jobs"]):
        found.append("jobs: name secrets; whoever needs one gets a workflow that no fork can cause")
    for name, job in workflow["jobs"].items():
        found += [f"{name}: {fault}" for fault in _job_objections(workflow, job)]
        found += [f"{name}: {fault}" for step in job["steps"] for fault in _step_objections(step)]
    return found


def _job_objections(workflow: Workflow, job: Mapping[str, Any]) -> Iterator[str]:
    if "timeout-minutes" not in job:
        yield "has no timeout-minutes"
    if "permissions" not in job:
        yield "has no permissions"
    writes = "write" in (job.get("permissions") or {}).values()
    if writes and any(str(step.get("uses", "")).startswith("actions/checkout@") for step in job["steps"]):
        yield "checks out code although it may write"
    if "self-hosted" not in str(job["runs-on"]):
        return
    if writes:
        yield "may write on a machine of ours"
    if events(workflow) & {"pull_request", "workflow_run"}:
        yield "runs on a machine of ours from a workflow that a fork can change or cause"
    if "pull_request_target" in events(workflow) and not ("gate" in job.get("needs", ()) and GATE in job.get("if", "")):
        yield "runs on a machine of ours without the gate"
    if "pull_request_target" in events(workflow):
        refs = [step["with"].get("ref") for step in job["steps"] if "checkout@" in str(step.get("uses", ""))]
        if refs != ["${{ needs.gate.outputs.sha }}"]:
            yield "checks out another commit than the gate approved"


def _step_objections(step: Mapping[str, Any]) -> Iterator[str]:
    uses = str(step.get("uses", ""))
    if uses and not PINNED.fullmatch(uses):
        yield f"uses {uses}, which is not pinned by a commit"
    if uses.startswith("actions/checkout@") and step.get("with", {}).get("persist-credentials") is not False:
        yield "leaves the token in the checkout"
    if "actions/cache" in uses or "cache" in step.get("with", {}):
        yield "has a cache, which foreign code could poison"
    if "${{" in str(step.get("run", "")):
        yield "puts an expression into a script; hand it over in env"
