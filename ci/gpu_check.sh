#!/bin/sh
# Kernels and reference engine on one NVIDIA GPU: property tests compiled, engine against its CPU self, benchmarks.
# Needs torch, triton, pytest and hypothesis. PYTHON names the interpreter; options are those of gpu_check.py.
# Exit codes: 0 all passed, 1 something failed, 2 wrong usage, 3 no GPU here, 4 the deadline came first.
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
  if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
unset TRITON_INTERPRET
PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m ci.gpu_check "$@"
