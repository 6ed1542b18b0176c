"""Imported once by the server from which trials fork: what is slow to import or to build and no mutant can touch."""

from __future__ import annotations

import gc
import sys
from importlib import import_module

import hypothesis
import numpy
import pytest
import scipy.stats
import torch
import xgrammar

from harness.known_answer import FAMILIES
from harness.workloads.known import vocabulary

PRELOADED = (hypothesis, numpy, pytest, scipy.stats, torch, xgrammar)
OURS = ("features", "grammars", "hostile", "lane", "laws", "lives", "machine", "mutilate", "scenarios", "sweeps")

for name in OURS:
    import_module(f"harness.workloads.{name}")
for name in FAMILIES:
    vocabulary(name)
touched = [name for name in sys.modules if name.partition(".")[0] in ("reference_engine", "kernels")]
# Nothing of this is garbage: no collection needs to look at it again.
gc.freeze()
assert not touched, f"mutants could not be made any more: {touched} were imported"
