"""What runs on machines of one's own: a commit of the repository, or one that somebody labelled and reviewed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ci import approval
from suites.registration import suite

suite(seconds=1, stage="cpu", needs="cpu")

HERE, FORK, LABEL = "us/draftproof", "them/draftproof", "gpu-approved"
OLD, HEAD = "a" * 40, "b" * 40


def labelled() -> dict[str, Any]:
    """A maintainer labels a pull request from a fork."""
    return {
        "action": "labeled",
        "label": {"name": LABEL},
        "sender": {"login": "maintainer"},
        "repository": {"full_name": HERE},
        "pull_request": {
            "number": 7,
            "user": {"type": "User"},
            "head": {"sha": HEAD, "repo": {"full_name": FORK}},
        },
    }


class Github:
    """What the API knows: permissions, the head of pull request 7, and its reviews as (login, commit, state)."""

    def __init__(self) -> None:
        self.permissions = {"maintainer": "admin", "reviewer": "write", "triager": "read"}
        self.head = HEAD
        self.reviews = [("reviewer", HEAD, "COMMENTED")]

    def get(self, path: str) -> Any:
        parts = path.partition("?")[0].split("/")
        if parts[3] == "collaborators":
            return {"permission": self.permissions.get(parts[4], "none")}
        if parts[-1] == "reviews":
            page = int(path.rpartition("page=")[2])
            listed = [{"user": {"login": who}, "commit_id": at, "state": said} for who, at, said in self.reviews]
            return listed[(page - 1) * approval.PAGE : page * approval.PAGE]
        return {"head": {"sha": self.head}}


def decide(event: dict[str, Any], github: Github) -> approval.Decision:
    return approval.decide("pull_request_target", event, "c" * 40, LABEL, github.get)


def test_a_label_with_a_review_of_the_commit_approves_that_commit() -> None:
    decision = decide(labelled(), Github())
    assert decision.approved
    assert decision.sha == HEAD
    assert "labelled by maintainer, reviewed at this commit by reviewer" in decision.why


@pytest.mark.parametrize("reviews", [[], [("reviewer", OLD, "APPROVED")], [("triager", HEAD, "APPROVED")]])
def test_a_label_without_a_review_of_that_commit_approves_nothing(reviews: list[tuple[str, str, str]]) -> None:
    """A push in the moment of the label leaves a head that nobody has seen."""
    github = Github()
    github.reviews = reviews
    decision = decide(labelled(), github)
    assert not decision.approved
    assert f"nobody who may write has reviewed {HEAD}" in decision.why


@pytest.mark.parametrize("state", ["CHANGES_REQUESTED", "DISMISSED", "PENDING"])
def test_the_last_review_of_a_reviewer_counts(state: str) -> None:
    github = Github()
    github.reviews.append(("reviewer", HEAD, state))
    assert not decide(labelled(), github).approved
    github.reviews.append(("reviewer", HEAD, "APPROVED"))
    assert decide(labelled(), github).approved


def test_reviews_on_later_pages_are_read() -> None:
    github = Github()
    github.reviews = [("triager", HEAD, "COMMENTED")] * approval.PAGE + github.reviews
    assert decide(labelled(), github).approved


@pytest.mark.parametrize("giver", ["triager", "stranger"])
def test_who_may_not_write_opens_nothing(giver: str) -> None:
    event = labelled()
    event["sender"]["login"] = giver
    decision = decide(event, Github())
    assert not decision.approved
    assert f"{giver} may not write" in decision.why


def test_a_head_that_has_moved_is_not_approved() -> None:
    github = Github()
    github.head = OLD
    assert "is not the head any more" in decide(labelled(), github).why
    assert not decide(labelled(), github).approved


def test_another_label_approves_nothing() -> None:
    event = labelled()
    event["label"]["name"] = "documentation"
    assert not decide(event, Github()).approved


@pytest.mark.parametrize("action", ["opened", "synchronize", "reopened"])
def test_a_push_to_a_fork_waits_for_its_own_label(action: str) -> None:
    event = labelled()
    event["action"] = action
    event["pull_request"]["labels"] = [{"name": LABEL}]
    decision = decide(event, Github())
    assert not decision.approved
    assert f"review {HEAD}, then give the label {LABEL}" in decision.why
    event["pull_request"]["head"]["repo"] = None
    assert not decide(event, Github()).approved


def test_a_branch_of_the_repository_needs_no_label_unless_a_robot_pushed_it() -> None:
    event = labelled()
    event["action"] = "synchronize"
    event["pull_request"]["head"]["repo"]["full_name"] = HERE
    assert decide(event, Github()).approved
    event["pull_request"]["user"]["type"] = "Bot"
    assert not decide(event, Github()).approved


@pytest.mark.parametrize("name", ["push", "workflow_dispatch"])
def test_a_commit_of_the_repository_runs(name: str) -> None:
    assert approval.decide(name, {}, HEAD, LABEL, Github().get) == approval.Decision(
        True, HEAD, f"{name}: a commit of this repository"
    )


@pytest.fixture
def served() -> Iterator[tuple[str, Github, list[str]]]:
    """The same over HTTP -> its address, what it knows, and the tokens that it was shown."""
    github, tokens = Github(), list[str]()

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            tokens.append(self.headers["Authorization"])
            body = json.dumps(github.get(self.path.removeprefix("/"))).encode()
            missing = body == b'{"permission": "none"}'
            self.send_response(404 if missing else 200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", github, tokens
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("giver", "approved"), [("maintainer", "true"), ("stranger", "false")])
def test_the_gate_as_the_workflow_runs_it(
    served: tuple[str, Github, list[str]], tmp_path: Path, giver: str, approved: str
) -> None:
    address, _, tokens = served
    event = deepcopy(labelled())
    event["sender"]["login"] = giver
    (tmp_path / "event.json").write_text(json.dumps(event), encoding="utf-8")
    variables = {
        "GITHUB_API_URL": address,
        "GITHUB_EVENT_NAME": "pull_request_target",
        "GITHUB_EVENT_PATH": str(tmp_path / "event.json"),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_SHA": OLD,
        "GITHUB_TOKEN": "a-token",
    }
    # Nothing is installed where the gate runs.
    done = subprocess.run(
        [sys.executable, "-I", "-S", approval.__file__, "--label", LABEL],
        env={**variables, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (tmp_path / "output").read_text(encoding="utf-8") == f"approved={approved}\nsha={HEAD}\n"
    assert set(tokens) == {"Bearer a-token"}
    assert "a-token" not in done.stdout + done.stderr


def test_an_api_that_does_not_answer_approves_nothing() -> None:
    with pytest.raises(SystemExit, match="nothing is approved"):
        approval.api("http://127.0.0.1:9", "a-token")("repos/us/draftproof/pulls/7")
