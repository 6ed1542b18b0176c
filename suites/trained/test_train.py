"""Training at a toy size: what is written can be resumed, read back and run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from harness.trained import checkpoints
from harness.trained.cli import app
from harness.trained.measure import measure, requests
from harness.trained.plan import Plan
from harness.trained.spoken import continued
from harness.trained.target import SHAPE
from harness.trained.train import LOG, STEPS_BETWEEN_STATES, OnStep, train
from suites.registration import suite

suite(seconds=5.2, stage="cpu", needs="cpu")

TOY = dataclasses.replace(SHAPE, hidden_size=32, intermediate_size=32, num_heads=1, num_kv_heads=1)
STEPS = STEPS_BETWEEN_STATES + 3
PLANS = tuple(Plan(seed=seed, steps=STEPS, batch=2, length=24, peak_rate=5e-2) for seed in (1, 2, 3))


def toy(out: Path, on_step: OnStep | None = None) -> Path:
    train(out, plans=PLANS[:2], further={"eagle3": PLANS[2]}, shape=TOY, on_step=on_step)
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("whole"))


def logged(out: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / LOG).read_text().splitlines()]


def without_times(out: Path) -> list[dict[str, object]]:
    return [{key: value for key, value in entry.items() if key != "cpu_seconds"} for entry in logged(out)]


class Interrupted(Exception):
    pass


def interrupting(places: Sequence[tuple[str, int]]) -> OnStep:
    left = list(places)

    def on_step(stage: str, done: int, _steps: int, _losses: dict[str, float]) -> None:
        if (stage, done) in left:
            left.remove((stage, done))
            raise Interrupted

    return on_step


def test_resumed_training_gives_the_weights_of_an_uninterrupted_run(whole: Path, tmp_path: Path) -> None:
    """Interrupted where a state has just been kept, and in each stage where steps have to be taken again."""
    places = [("target", STEPS_BETWEEN_STATES), ("target", STEPS - 1), ("drafters", STEPS - 1)]
    places += [("eagle3", STEPS - 1)]
    on_step = interrupting(places)
    for _ in places:
        with pytest.raises(Interrupted):
            toy(tmp_path, on_step)
    toy(tmp_path, on_step)
    assert checkpoints.sums(tmp_path).keys() == checkpoints.sums(whole).keys()
    different = {name for name, digest in checkpoints.sums(whole).items() if checkpoints.sums(tmp_path)[name] != digest}
    assert different <= {LOG}
    assert without_times(tmp_path) == without_times(whole)


def test_the_log_names_seeds_and_shows_that_losses_fall(whole: Path) -> None:
    plans = {entry["stage"]: entry["plan"] for entry in logged(whole) if "plan" in entry}
    assert plans == dict(zip(("target", "drafters", "eagle3"), map(dataclasses.asdict, PLANS), strict=True))
    rows = [entry["losses"] for entry in logged(whole) if entry.get("step") == STEPS]
    assert set().union(*rows) == {"target", *checkpoints.DRAFTERS}
    assert all(loss < 5.0 for losses in rows for loss in losses.values())  # ln 257 = 5.55 before training


def test_behind_a_beginning_the_stored_target_goes_on_greedily(whole: Path) -> None:
    windows = PLANS[2].windows(0)
    said = continued(windows, "seed", whole)
    choices = checkpoints.target(whole, TOY)(said).logits.argmax(-1)
    assert said.shape == windows.shape
    for ids, text, chosen in zip(said, windows, choices, strict=True):
        kept = next(kept for kept in range(1, len(ids)) if torch.equal(ids[kept:], chosen[kept - 1 : -1]))
        assert kept <= 3 * len(ids) // 8
        assert torch.equal(ids[:kept], text[:kept])


def test_a_damaged_file_is_named(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    assert checkpoints.damaged(tmp_path) == []
    weights = tmp_path / "eagle" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    (tmp_path / "mtp" / "config.json").unlink()
    (tmp_path / "stray").touch()
    assert checkpoints.damaged(tmp_path) == ["eagle/model.safetensors", "mtp/config.json", "stray"]


def test_the_command_fails_on_a_damaged_file_and_a_drafter_that_falls_short(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / LOG).write_text("")
    # All ones draft what the target never says, or so it is at this size: below any bound.
    path = tmp_path / "eagle" / "model.safetensors"
    save_file({name: torch.ones_like(tensor) for name, tensor in load_file(path).items()}, path)
    found = CliRunner().invoke(app, ["check", "--root", str(tmp_path), "--drafter", "eagle", "--prompts", "2"])
    assert found.exit_code == 1
    assert f"{LOG}: not as {checkpoints.SUMS} says" in found.output
    assert "eagle: accept length 1.000 is below 2.2" in found.output


def test_a_folder_without_checksums_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no SHA256SUMS there"):
        checkpoints.damaged(tmp_path)


@pytest.mark.parametrize("folder", checkpoints.DRAFTERS)
def test_a_fresh_training_runs_in_the_engine(whole: Path, folder: str) -> None:
    found = measure(folder, requests(2, 16), root=whole)
    assert found.tokens == 32
    assert 1 <= found.accept_len <= 4
