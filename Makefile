# Everything a contributor needs: `make test` sets up .venv and runs all checks.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard src/blockgate/csrc/*.h src/blockgate/csrc/*/*)

.PHONY: setup demo lint test sanitize docs block-size wheel clean

setup: $(VENV)/.installed

# torch first and apart: its headers are needed to build the kernels, and build isolation would download it again.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy setuptools wheel ninja
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

# Trains and times small models, dense and gated, and writes blockgate-demo/report.html. Once set up, needs no network.
demo: setup
	$(BIN)/python -m blockgate demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

# The kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of its own. Freed memory is held
# back there, so the test that looks for growth stays out.
SANITIZED := build/sanitize/lib
sanitize: setup
	BLOCKGATE_SANITIZE=1 $(BIN)/python setup.py --quiet build --build-base build/sanitize --build-lib $(SANITIZED)
	PYTHONPATH=$(SANITIZED) LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -q -p no:cacheprovider \
	  tests/formats tests/ops/test_kernels.py tests/ops/test_registered.py tests/ops/test_packed.py \
	  tests/ops/test_packed_integers.py tests/ops/test_forget_pool.py tests/ops/test_gated_lstm.py tests/ops/test_gated_lstm_use.py \
	  tests/ops/test_prepared_lstm.py tests/runtime/test_fused.py -k "not memory_growth"

# The site, in build/site; every warning is an error. The variable silences an announcement of the theme's authors.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# The measurement and the picture of docs/block-size.md. Let nothing else run meanwhile.
MACHINE ?= epyc-zen3_2-threads
block-size: setup
	$(BIN)/python benchmarks/block_size.py --output benchmarks/results/block-size_$(MACHINE)
	$(BIN)/python docs/pictures/draw.py --times benchmarks/results/block-size_$(MACHINE).json

wheel: setup
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/blockgate/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
