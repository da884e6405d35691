# Everything a contributor needs: `make test` sets up .venv and runs all checks, `make demo` shows the library at work.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard src/blockgate/csrc/*)

.PHONY: setup lint test wheel clean

setup: $(VENV)/.installed

# torch first and apart: its headers are needed to build the kernels, and build isolation would download it again.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy setuptools wheel ninja
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

wheel: setup
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/blockgate/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
