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

REPOSITORY = Path(__file__).resolve().parents[2]

PROBE = """
import importlib.metadata, sys
sys.path.insert(0, sys.argv[1])
if sys.argv[2] == "alone":
    importlib.metadata.packages_distributions = dict
from transformers.utils.import_utils import is_kernels_available
print("taken" if is_kernels_available() else "left alone")
"""


def probe(root: Path, metadata: str = "alone") -> subprocess.CompletedProcess[str]:
    """Ask transformers in a fresh process with `root` first on its path: it decides only once in a process. "alone"
    hides which distribution holds the folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", PROBE, str(root), metadata]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=root)


def folder(root: Path, source: str) -> Path:
    package = root / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text(source)
    return root


def test_a_folder_of_that_name_is_left_alone(tmp_path: Path) -> None:
    done = probe(folder(tmp_path, '"""Kernels of ours."""\n'))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "left alone"


def test_the_probe_sees_a_folder_that_is_taken(tmp_path: Path) -> None:
    """With a version inside the range that transformers supports it is taken."""
    version = "from transformers.utils.import_utils import KERNELS_MIN_VERSION as __version__\n"
    done = probe(folder(tmp_path, version))
    assert done.stdout.strip() == "taken", done.stderr


@pytest.mark.parametrize("metadata", ["alone", "installed"])
def test_this_repository_is_left_alone(metadata: str) -> None:
    done = probe(REPOSITORY, metadata)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "left alone"
