"""Faults planted in a copy of the source: what is counted shows each of them, in a process that runs both."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path

import pytest

from ci.perf import checkpoints, power, timed, trees
from ci.perf.gate import compare_counted, judge_timed
from ci.perf.rule import Rule, effect, values_of
from suites.registration import suite
from suites.tiers import FULL

suite(seconds=12, stage="cpu", needs="cpu")

LANE = "engine/walk/EAGLE"
PLANTS = {
    "an extra target forward in every verify step": (
        "reference_engine/runner.py",
        "        target = self._decode_pass(window, num_pages)\n",
        "        self._decode_pass(window, num_pages)\n        target = self._decode_pass(window, num_pages)\n",
        "target_forwards_per_token",
    ),
    "a page that is never given back": (
        "reference_engine/cache/pages.py",
        "        for page in pages:\n            assert self._refs[page] > 0",
        "        for page in list(pages)[1:]:\n            assert self._refs[page] > 0",
        "pages_at_idle",
    ),
    "a copy of the hidden rows that nobody needs": (
        "reference_engine/runner.py",
        "        logits = self.target.logits(hidden)\n        return TargetPass",
        "        hidden = hidden.clone()\n        logits = self.target.logits(hidden)\n        return TargetPass",
        "copied_bytes_per_token",
    ),
    "a copy of the KV that is read": (
        "reference_engine/cache/kv.py",
        "self.pages.index_select(1, pages.view(-1))",
        "self.pages.index_select(1, pages.view(-1)).clone()",
        "copied_bytes_per_token",
    ),
}


def copy_of_source(folder: Path) -> Path:
    for part in trees.PARTS:
        shutil.copytree(trees.ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def edit(root: Path, file: str, old: str, new: str) -> None:
    text = (root / file).read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file} has changed: plant this fault where its code is now"
    (root / file).write_text(text.replace(old, new), encoding="utf-8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    walk = checkpoints.CHECKPOINTS["walk"]
    return {"walk": walk.write(tmp_path_factory.mktemp("checkpoints"))}


def counted(root: Path, folders: dict[str, Path], places: tuple[str, ...] = (LANE,)) -> dict[str, float]:
    tree = trees.load(root)
    with tree.active():
        figures: dict[str, float] = tree.modules[trees.COUNTING].count(folders, places)
    return figures


@pytest.fixture(scope="module")
def as_it_is(folders: dict[str, Path]) -> dict[str, float]:
    return counted(trees.ROOT, folders)


def test_counting_twice_gives_the_same(folders: dict[str, Path], as_it_is: dict[str, float]) -> None:
    assert counted(trees.ROOT, folders) == as_it_is
    assert {name.rpartition("/")[2] for name in as_it_is} >= {figure for *_, figure in PLANTS.values()}


@pytest.mark.parametrize("fault", PLANTS)
def test_a_planted_fault_shows_in_what_is_counted(
    fault: str, tmp_path: Path, folders: dict[str, Path], as_it_is: dict[str, float]
) -> None:
    file, old, new, figure = PLANTS[fault]
    edit(copy_of_source(tmp_path), file, old, new)
    findings = list(compare_counted(as_it_is, counted(tmp_path, folders)))
    assert f"{LANE}/{figure}" in [finding.name for finding in findings if finding.kind == "regression"]


def test_two_trees_in_one_process_do_not_share_modules(tmp_path: Path) -> None:
    edit(copy_of_source(tmp_path), "kernels/base.py", "VOCAB_WARPS = 8", "VOCAB_WARPS = 9")
    here = importlib.import_module("kernels.base")
    mine, other = trees.load(trees.ROOT), trees.load(tmp_path)
    assert sys.modules["kernels.base"] is here
    assert mine.modules["kernels.base"].VOCAB_WARPS == 8
    assert other.modules["kernels.base"].VOCAB_WARPS == 9
    with other.active():
        # Imported only now, when it is asked for.
        kernel = other.modules["kernels"].KERNELS["shift_append"]
    assert Path(kernel.call.__code__.co_filename).is_relative_to(tmp_path)


def test_a_tree_with_a_folder_missing_is_refused(tmp_path: Path) -> None:
    shutil.rmtree(copy_of_source(tmp_path) / "kernels")
    with pytest.raises(ValueError, match="imported from elsewhere"):
        trees.load(tmp_path)


def test_a_source_that_this_clone_does_not_have_is_named_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unshallow"):
        trees.extract({"kernels": "0" * 40}, tmp_path)


def record(base: Path, head: Path, folders: dict[str, Path], out: Path, blocks: int, pairs: int) -> timed.Recording:
    return timed.record(base, head, folders["walk"].parent, out, blocks=blocks, pairs=pairs, only=[LANE])


def test_a_source_that_takes_twice_as_long_is_timed_so(tmp_path: Path, folders: dict[str, Path]) -> None:
    slow = copy_of_source(tmp_path / "slow")
    power.plant(slow, 1.0)
    recording = record(trees.ROOT, slow, folders, tmp_path, blocks=2, pairs=3)
    assert recording.failures == {}
    assert 0.3 < effect(values_of(recording.blocks, LANE)) < 1.0


@FULL
def test_a_planted_slowdown_of_5_percent_fails_the_gate(tmp_path: Path, folders: dict[str, Path]) -> None:
    slow = copy_of_source(tmp_path / "slow")
    power.plant(slow, 0.05)
    rule = Rule()
    outcome = judge_timed(lambda blocks, _: record(trees.ROOT, slow, folders, tmp_path, blocks, rule.pairs), rule)
    assert [(finding.kind, finding.name) for finding in outcome.findings] == [("regression", LANE)]
