"""Failing examples that runs share: what one finds is what the next tries first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import core, settings

from harness.report.examples import PASSWORD, database
from suites.ci.redis_server import serving
from suites.registration import suite
from suites.tiers import tiered

suite(seconds=0.9, stage="cpu", needs="cpu")

SECRET = "pass-word"

SUITE = """
from pathlib import Path
from hypothesis import given, settings, strategies as st

@settings(max_examples=200)
@given(number=st.integers(0, 10**6))
def test_numbers_are_small(number):
    with Path("tried").open("a") as file:
        print(number, file=file)
    assert number < 1234
"""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(PASSWORD, SECRET)
    with serving(SECRET) as url:
        yield url


PLACES = ["a folder", "a server"]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "examples") if request.param == "a folder" else request.getfixturevalue("server")


def test_what_one_process_saves_another_reads(place: str) -> None:
    database(place).save(b"test", b"example")
    assert set(database(place).fetch(b"test")) == {b"example"}


@pytest.fixture
def own_hypothesis() -> Iterator[None]:
    """A run in this process leaves hypothesis as it was."""
    name, seed = settings.get_current_profile_name(), core.global_force_seed
    profile = settings.get_profile(name)
    yield
    settings.register_profile(name, profile)
    settings.load_profile(name)
    core.global_force_seed = seed


@pytest.mark.usefixtures("own_hypothesis")
@pytest.mark.parametrize("place", tiered(PLACES, "a folder"), indirect=True)
@pytest.mark.parametrize("ci", ["", pytest.param("1", marks=pytest.mark.full)])
def test_a_run_with_another_seed_begins_with_what_was_found(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, place: str, ci: str
) -> None:
    monkeypatch.setenv("CI", ci)
    pytester.makeini("[pytest]")
    pytester.makepyfile(test_numbers=SUITE)
    tried = pytester.path / "tried"
    options = ["--tier", "full", "--examples", place, "-p", "no:cacheprovider"]
    for seed in (1, 2):
        tried.write_text("")
        result = pytester.runpytest_inprocess(*options, f"--hypothesis-seed={seed}")
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines(["*number=1234*"])
        assert SECRET not in result.stdout.str() + result.stderr.str()
    assert tried.read_text().splitlines()[0] == "1234"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://:hidden@127.0.0.1/0", "take the password out of it, and set DRAFTPROOF_REDIS_PASSWORD"),
        ("redis://127.0.0.1/0?password=hidden", "take the password out"),
        ("mysql://127.0.0.1/0", "must be a folder, redis://"),
        ("redis:///0", "must be a folder, redis://"),
        ("redis://127.0.0.1:1/0", "is the server there"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_without_its_password(url: str, words: str) -> None:
    with pytest.raises(ValueError, match="example database") as caught:
        database(url)
    assert words in str(caught.value)
    assert "hidden" not in str(caught.value)
