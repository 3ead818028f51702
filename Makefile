# One virtual environment in .venv; nothing here needs root. `make demo` and `make test` set up what they need.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-gpu lint format bench clean

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.installed-runtime
DEV := $(VENV)/.installed-dev
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
# The first interpreter that is new enough, unless PYTHON names one.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; break; }; done)
# Ranks share the machine: one computing thread each unless told otherwise.
export OMP_NUM_THREADS ?= 1

help:
	@echo 'make demo      train on real text, lose a node, reshape, take it back, finish (installs on first use)'
	@echo 'make test      lint, types, import rules and the quick tests'
	@echo 'make test-all  the long tests as well; goes on where it was interrupted'
	@echo 'make test-gpu  the engine over NCCL, on a machine with GPUs'
	@echo 'make setup     only install the runtime into $(VENV)'
	@echo 'make lint      ruff, mypy, import-linter'
	@echo 'make format    let ruff format the code'
	@echo 'make bench     every program in benchmarks/, one JSON line each'
	@echo 'make clean     remove $(VENV), caches and build products; runs/ stays'

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'no Python 3.11 or newer found; name one: make PYTHON=/path/to/python3' >&2; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || { \
		echo 'this Python cannot make virtual environments; install its venv package, or name another: make PYTHON=...' >&2; exit 1; }
	'$(PYTHON)' -m venv $(VENV)

# The stamps are newer than pyproject.toml once everything that it names is installed, so a repeat costs nothing.
$(RUNTIME): pyproject.toml | $(BIN)/python
	@echo 'installing the runtime into $(VENV); this takes a minute or two the first time'
	$(PIP) --editable .
	@touch $@

$(DEV): $(RUNTIME)
	$(PIP) --editable '.[dev]'
	@touch $@

setup: $(RUNTIME)

demo: $(RUNTIME)
	@$(BIN)/everstep demo $(DEMO_FLAGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(DEV)
	$(BIN)/ruff format .

test: lint
	$(BIN)/python -m pytest -m 'not long'

# One stamp for each test file that passed at this very state of the code, so an interrupted run goes on where it was.
test-all: lint
	@state=$$(git rev-parse HEAD)-$$(git diff HEAD | git hash-object --stdin | cut -c1-12); \
	stamps=build/test-all/$$state; mkdir -p "$$stamps"; failed=; \
	for file in $$(git ls-files 'tests/*test_*.py' ':!tests/gpu'); do \
		stamp="$$stamps/$${file//\//.}"; \
		if [ -e "$$stamp" ]; then echo "$$file: passed before"; continue; fi; \
		echo "$$file"; \
		if $(BIN)/python -m pytest "$$file"; then touch "$$stamp"; \
		elif [ $$? -eq 5 ]; then touch "$$stamp"; else failed="$$failed $$file"; fi; \
	done; \
	if [ -n "$$failed" ]; then echo "failed:$$failed" >&2; exit 1; fi

# Needs GPUs: the engine over NCCL.
test-gpu: $(DEV)
	$(BIN)/python -m pytest tests/gpu

bench: $(DEV)
	@for program in benchmarks/*.py; do \
		[ "$$program" != benchmarks/report.py ] || continue; \
		echo "== $$program"; $(BIN)/python "$$program"; \
	done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
