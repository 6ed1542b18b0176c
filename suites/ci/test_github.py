"""The client of GitHub's API against a server: what it asks, what it does about each refusal, and what it says."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ci.github import GitHub, GitHubError, JitRequest, Scope, checked_url
from suites.ci.fake_github import FakeGitHub, serving
from suites.registration import suite

suite(seconds=3.2, stage="cpu", needs="cpu")

TOKEN = "ghp_a-token-that-nobody-may-see"
REPO, ORG = Scope("octo", "engine"), Scope("octo")
REQUEST = JitRequest(name="box-1", runner_group_id=1, labels=("self-hosted", "gpu"), work_folder="_work/box-1")
POST = "POST .*jitconfig"
GET = "GET .*/runners$"


@pytest.fixture
def fake() -> Iterator[FakeGitHub]:
    with serving(TOKEN) as server:
        yield server


@pytest.fixture
def github(fake: FakeGitHub) -> Iterator[GitHub]:
    client = GitHub(fake.url, lambda: TOKEN, pause=0.01)
    yield client
    client.close()


@pytest.mark.parametrize(("scope", "path"), [(REPO, "/repos/octo/engine"), (ORG, "/orgs/octo")])
def test_a_runner_is_registered_found_and_removed(github: GitHub, fake: FakeGitHub, scope: Scope, path: str) -> None:
    made = github.generate_jit_configuration(scope, REQUEST)
    (asked,) = fake.asked
    assert (asked.method, asked.path) == ("POST", f"{path}/actions/runners/generate-jitconfig")
    assert asked.body == {
        "name": "box-1",
        "runner_group_id": 1,
        "labels": ["self-hosted", "gpu"],
        "work_folder": "_work/box-1",
    }
    assert made.configuration not in repr(made)
    found = github.find_runner(scope, "box-1")
    assert found is not None
    assert found.id == made.id
    assert github.remove_runner(scope, made.id)
    assert not github.remove_runner(scope, made.id)
    assert github.find_runner(scope, "box-1") is None


def test_a_group_is_found_on_any_page_of_the_organisation(github: GitHub, fake: FakeGitHub) -> None:
    fake.groups = {f"group-{number}": number for number in range(1, 251)}
    assert github.group_id(ORG, "group-250") == 250
    assert github.group_id(REPO, "group-1") == 1
    assert fake.asked[-1].query["visible_to_repository"] == "engine"
    with pytest.raises(GitHubError, match=r"--group nobody: .*no such runner group.*group-1, group-10"):
        github.group_id(ORG, "nobody")


def test_the_default_group_of_a_repository_takes_no_right_to_list_groups(github: GitHub, fake: FakeGitHub) -> None:
    assert github.group_id(REPO, "Default") == 1
    assert not fake.asked


REFUSALS: list[tuple[int, dict[str, str], Any, list[str]]] = [
    (401, {}, {"message": "Bad credentials"}, ["401", "expired", "make a new one", "Bad credentials"]),
    (403, {}, {"message": "Must have admin rights"}, ["403", "repository octo/engine", "Administration: write"]),
    (403, {"X-GitHub-SSO": "required; url=x"}, {"message": "SAML"}, ["single sign-on"]),
    (404, {}, {"message": "Not Found"}, ["404", "repository octo/engine", "spelling"]),
    (409, {}, {"message": "Already exists"}, ["409", "--name"]),
    (
        422,
        {},
        {"message": "Invalid", "errors": [{"field": "labels", "code": "invalid"}, "too many"]},
        ["422", "labels invalid", "too many"],
    ),
    (301, {"Location": "/repositories/1"}, {"message": "Moved"}, ["has moved", "new name"]),
    (418, {}, b"short and stout", ["418", "--api-url"]),
    (429, {"Retry-After": "3600"}, {"message": "slow down"}, ["rate limit", "3600 seconds", "UTC"]),
    (403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "99999999999"}, {"message": "x"}, ["rate limit"]),
]


@pytest.mark.parametrize(("status", "headers", "body", "words"), REFUSALS)
def test_a_refusal_says_what_to_do_and_is_not_asked_again(
    github: GitHub, fake: FakeGitHub, status: int, headers: dict[str, str], body: Any, words: list[str]
) -> None:
    fake.plan(POST, status, body, headers=headers)
    with pytest.raises(GitHubError) as caught:
        github.generate_jit_configuration(REPO, REQUEST)
    for word in ["could not register runner box-1 for repository octo/engine", *words]:
        assert word in str(caught.value)
    assert (caught.value.status, caught.value.ambiguous) == (status, False)
    assert len(fake.asked) == 1


def test_an_organisation_needs_another_permission(github: GitHub, fake: FakeGitHub) -> None:
    fake.plan(POST, 403, {"message": "no"})
    with pytest.raises(GitHubError, match=r"organisation octo .*Self-hosted runners: write"):
        github.generate_jit_configuration(ORG, REQUEST)


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [
        (429, {"Retry-After": "1"}, 1.0),
        (403, {"Retry-After": "1"}, 1.0),
        (403, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "now"}, 0.0),
    ],
)
def test_a_short_rate_limit_is_waited_for(
    github: GitHub,
    fake: FakeGitHub,
    caplog: pytest.LogCaptureFixture,
    status: int,
    headers: dict[str, str],
    seconds: float,
) -> None:
    headers = {name: str(int(time.time())) if value == "now" else value for name, value in headers.items()}
    fake.plan(POST, status, {"message": "You have exceeded a secondary rate limit"}, headers=headers)
    started = time.monotonic()
    assert github.generate_jit_configuration(REPO, REQUEST).name == "box-1"
    assert time.monotonic() - started >= seconds
    assert "rate limit" in caplog.text


def test_a_secondary_limit_that_says_no_time_is_given_a_minute(
    github: GitHub, fake: FakeGitHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ci.github.LONGEST_WAIT", 59.0)
    fake.plan(POST, 403, {"message": "You have exceeded a secondary rate limit."})
    with pytest.raises(GitHubError, match=r"rate limit .*in 60 seconds"):
        github.generate_jit_configuration(REPO, REQUEST)


@pytest.mark.parametrize("status", [500, 502, 503, 0])
def test_what_changes_nothing_is_asked_again_when_the_server_fails(
    github: GitHub, fake: FakeGitHub, status: int
) -> None:
    fake.plan(GET, status, times=3)
    assert github.find_runner(REPO, "box-1") is None
    assert len(fake.asked) == 4


@pytest.mark.parametrize("status", [500, 503, 0])
def test_a_registration_that_may_have_been_made_is_not_asked_for_twice(
    github: GitHub, fake: FakeGitHub, status: int
) -> None:
    fake.plan(POST, status, b"<html>upstream</html>")
    with pytest.raises(GitHubError) as caught:
        github.generate_jit_configuration(REPO, REQUEST)
    assert caught.value.ambiguous
    assert len(fake.asked) == 1


def test_a_server_that_is_not_there_is_tried_again_and_told(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        github = GitHub(url, lambda: TOKEN, pause=0.01)
        with pytest.raises(GitHubError, match=r"does not answer .*check the network") as caught:
            github.generate_jit_configuration(REPO, REQUEST)
    assert not caught.value.ambiguous
    assert len(caplog.records) == 3


@pytest.mark.parametrize(
    "body",
    [
        b"<html>Log in to the Wi-Fi</html>",
        b"[]",
        b'{"runner": {"id": 1, "name": "box-1"}, "encoded_jit_config": ""}',
        b'{"encoded_jit_config": "c2VjcmV0"}',
        b"\xff\xfe",
    ],
)
def test_an_answer_that_github_would_not_send_is_told_without_its_text(
    github: GitHub, fake: FakeGitHub, body: bytes
) -> None:
    fake.plan(POST, 201, body)
    with pytest.raises(GitHubError, match="not what GitHub sends") as caught:
        github.generate_jit_configuration(REPO, REQUEST)
    assert caught.value.ambiguous
    assert "c2VjcmV0" not in str(caught.value)
    assert "Wi-Fi" not in str(caught.value)


def test_no_answer_brings_the_token_into_what_is_said(
    github: GitHub, fake: FakeGitHub, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    fake.plan(POST, 429, {"message": f"token {TOKEN} is busy"}, headers={"Retry-After": "0"})
    fake.plan(POST, 422, {"message": f"token {TOKEN}\nis odd", "errors": [TOKEN]})
    with pytest.raises(GitHubError, match=r"token \*\*\* is odd; \*\*\*") as caught:
        github.generate_jit_configuration(REPO, REQUEST)
    assert TOKEN not in str(caught.value)
    assert "token *** is busy" in caplog.text
    assert TOKEN not in caplog.text


@pytest.mark.parametrize(
    ("url", "fine"),
    [
        ("https://api.github.com/", True),
        ("https://ghe.example.org/api/v3", True),
        ("http://127.0.0.1:8080", True),
        ("http://[::1]:8080", True),
        ("http://localhost:8080", True),
        ("http://api.github.com", False),
        ("http://127.0.0.1.example.org", False),
        ("https://me:secret@ghe.example.org", False),
        ("https://ghe.example.org/?token=x", False),
        ("ftp://ghe.example.org", False),
        ("api.github.com", False),
    ],
)
def test_a_token_goes_over_https_or_stays_on_this_machine(url: str, fine: bool) -> None:
    if fine:
        assert not checked_url(url).endswith("/")
        return
    with pytest.raises(ValueError, match="--api-url") as caught:
        checked_url(url)
    assert "secret" not in str(caught.value)
