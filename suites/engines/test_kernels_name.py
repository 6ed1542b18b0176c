"""transformers looks for a public package called `kernels`. A folder of ours with that name must not be taken for it.

transformers asks the metadata of installed distributions for a version first, ours included once it is installed with
the folder, and only then imports the folder and reads its `__version__`; without a version in its supported range it
does without the package. So the folder must carry no `__version__`, no distribution of that name may be installed with
us, and our own version must not come to lie in that range.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from suites.registration import suite
from suites.tiers import tiered

suite(seconds=2.5, stage="cpu", needs="cpu")

REPOSITORY = Path(__file__).resolve().parents[2]

PROBE = """
import importlib.metadata, sys
sys.path.insert(0, sys.argv[1])
if sys.argv[2] == "alone":
    importlib.metadata.packages_distributions = dict
from transformers.utils.import_utils import is_kernels_available
print("taken" if is_kernels_available() else "left alone")
"""


def probe(root: Path, metadata: str) -> subprocess.CompletedProcess[str]:
    """Ask transformers in a fresh process with `root` first on its path: it decides only once in a process. "alone"
    hides which distribution holds the folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", PROBE, str(root), metadata]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=root)


VERSION = "from transformers.utils.import_utils import KERNELS_MIN_VERSION as __version__\n"
CASES = {
    "a folder": ('"""Kernels of ours."""\n', "alone", "left alone"),
    "a folder with a version in range": (VERSION, "alone", "taken"),
    "this repository": (None, "alone", "left alone"),
    "this repository, installed": (None, "installed", "left alone"),
}
"""Source of the folder, what the metadata tells, and what becomes of it: the second shows that a probe sees it."""


@pytest.mark.parametrize("case", tiered(CASES, "a folder with a version in range", "this repository, installed"))
def test_a_folder_of_that_name_is_taken_only_with_a_version(case: str, tmp_path: Path) -> None:
    source, metadata, expected = CASES[case]
    root = REPOSITORY
    if source is not None:
        root = tmp_path
        (root / "kernels").mkdir()
        (root / "kernels" / "__init__.py").write_text(source)
    done = probe(root, metadata)
    assert done.stdout.strip() == expected, done.stderr
    assert done.returncode == 0, done.stderr
