# From a bare machine (python3, g++, make, git) to a demo or a test run in one command. Everything goes into .venv.
#
#   make demo    train a small model on real text over 4 ranks     TEXT=file, DEMO_ARGS="--steps 2"
#   make test    all tests                                         PYTEST_ARGS="-k ring -x"
#   make test-paths   all tests that reach the CPU kernels, under every instruction set of this machine
#   make test-faults   ranks that die, stop, fail or lose their link at every phase of a pass: all combinations
#   make test-properties   many more examples of the property tests        PYTEST_ARGS=--hypothesis-seed=1
#   make soak   thousands of mixed calls: nothing grows              SOAK_ARGS="--calls 20000 --ranks 3"
#   make test-asan    with sanitizers: the C++ tests of the CPU kernels, and the operators with up to two ranks
#   make test-tsan    virtual ranks under the thread sanitizer
#   make bench   attention on this CPU, checked and timed          BENCH_ARGS="--quick", PEERS=1 for the peer too
#   make bench-peers   the peer alone, from a virtual environment of its own
#   make wheel-cuda   the wheel with CUDA kernels, installed into .venv-cuda; needs no GPU     RINGATTN_ARCHS="80;90"
#   make lint, make format, make wheel, make build, make check-headers, make clean
#
# TORCH=2.14.1 chooses another torch and rebuilds for it; MAX_JOBS=n limits the compilers that run at a time.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

TORCH ?= 2.13.0
PYTHON3 ?= python3
VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip --disable-pip-version-check
STAMPS := $(VENV)/stamps
TORCH_STAMP := $(STAMPS)/torch-$(TORCH)
# Folders too: their times change when a file is added or deleted.
SOURCES := setup.py pyproject.toml CMakeLists.txt python/ringattn_ext/_version.py \
  $(shell find csrc third_party -not -path "*/__pycache__*")
CPP_FILES = $(shell find $(wildcard csrc tests bench examples) \( -name '*.h' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \))

.PHONY: help demo test test-paths test-faults test-properties soak test-asan test-tsan bench bench-peers build lint format wheel wheel-cuda check-headers clean
help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: build
	$(PYTHON) examples/train_demo.py $(if $(TEXT),--text "$(TEXT)") $(DEMO_ARGS)

test: build $(STAMPS)/nvcc
	$(PYTHON) -m pytest tests $(PYTEST_ARGS)

# What is left out is about builds, or about the kernels of GPUs, or runs under every instruction set on its own.
OTHER_TESTS := cuda emulator gpu streams test_build_guard.py test_cpp.py test_cuda_toolkit.py test_cuda_wheel.py \
  test_instruction_sets.py test_packaging.py
test-paths: build
	names=$$($(PYTHON) tests/instruction_sets.py); for name in $$names; do \
	  echo "RINGATTN_CPU=$$name"; \
	  RINGATTN_CPU=$$name $(PYTHON) -m pytest tests $(OTHER_TESTS:%=--ignore=tests/%) $(PYTEST_ARGS); \
	done

# make test runs as many of the combinations as cover all pairs.
test-faults: build
	RINGATTN_FAULTS=full $(PYTHON) -m pytest tests/test_faults.py $(PYTEST_ARGS)

test-properties: build
	HYPOTHESIS_PROFILE=many $(PYTHON) -m pytest tests/test_properties.py $(PYTEST_ARGS)

soak: build
	$(PYTHON) tests/soak.py $(SOAK_ARGS)

SANITIZED_TESTS := $(addprefix tests/test_,blocks.py attention_virtual.py sharding.py odd_input.py bad_input.py \
  nonfinite.py no_uninitialised.py)
test-asan: build
	$(PYTHON) -m pytest tests/test_cpp.py -k sanitizers $(PYTEST_ARGS)
	$(PYTHON) tests/sanitized.py address,undefined $(SANITIZED_TESTS) $(PYTEST_ARGS)

test-tsan: build
	$(PYTHON) tests/sanitized.py thread tests/test_attention_virtual.py $(PYTEST_ARGS)

# What the README shows is in bench/results; a run with arguments of its own does not replace it.
BENCH_RESULTS ?= $(if $(BENCH_ARGS),build,bench)/results
PEERS_VENV := .venv-peers
PEERS_STAMP := $(PEERS_VENV)/installed
PEERS_PYTHON := $(PEERS_VENV)/bin/python
bench: build $(if $(PEERS),$(PEERS_STAMP))
	$(if $(PEERS),$(PEERS_PYTHON),$(PYTHON)) bench/attention.py --json $(BENCH_RESULTS)/attention.json \
	  --chart $(BENCH_RESULTS)/attention.png $(BENCH_ARGS)

bench-peers: build $(PEERS_STAMP)
	$(PEERS_PYTHON) bench/attention.py --only '^peer' $(BENCH_ARGS)

# The peer and what it imports, without their own requirements: torch and this library are those of $(VENV).
PEERS_PACKAGES := ring-attention-pytorch==0.5.20 einops==0.8.2 beartype==0.23.1 jaxtyping==0.3.11 wadler-lindig==0.1.8
$(PEERS_STAMP): $(STAMPS)/venv Makefile
	$(PYTHON) -m venv --clear $(PEERS_VENV)
	packages='sysconfig.get_path("purelib")'; \
	  theirs=$$($(PEERS_PYTHON) -c "import sysconfig; print($$packages)"); \
	  $(PYTHON) -c "import sysconfig; print(f'import site; site.addsitedir({$$packages!r})')" > "$$theirs/beside.pth"
	$(PEERS_PYTHON) -m pip --disable-pip-version-check install --no-deps $(PEERS_PACKAGES)
	touch $@

# The tests of kernels compile CUDA to PTX, which needs no GPU: with the nvcc of the system, or of pip, pinned because
# what the tests count depends on the compiler.
NVCC := $(addsuffix '==13.0.*',nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime)
$(STAMPS)/nvcc: $(STAMPS)/venv
	command -v nvcc > /dev/null || $(PIP) install $(NVCC)
	touch $@

# An editable install: Python sources are used where they lie, C++ sources are compiled when one has changed.
build: $(STAMPS)/built
$(STAMPS)/built: $(TORCH_STAMP) $(SOURCES)
	$(PIP) install --no-build-isolation -e '.[demo,test]'
	touch $@

# One torch at a time, so the stamp of another one goes. The build requirements are those of pyproject.toml.
$(TORCH_STAMP): $(STAMPS)/venv
	rm -f $(STAMPS)/torch-*
	$(PIP) install "torch==$(TORCH)"
	touch $@

$(STAMPS)/venv: pyproject.toml
	@command -v $(PYTHON3) > /dev/null || { echo "make: $(PYTHON3) was not found; Python 3.11 or newer is needed"; exit 1; }
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $$($(PYTHON3) --version) is too old; name a Python 3.11 or newer: make PYTHON3=python3.11"; exit 1; }
	@$(PYTHON3) -c 'import ensurepip, sysconfig, venv; open(sysconfig.get_path("include") + "/Python.h")' 2> /dev/null || { \
	  echo "make: $(PYTHON3) lacks venv or Python.h; on Debian: apt-get install -y python3-venv python3-dev"; exit 1; }
	@command -v g++ > /dev/null || { echo "make: g++ was not found; on Debian: apt-get install -y g++"; exit 1; }
	test -x $(PYTHON) || $(PYTHON3) -m venv $(VENV)
	$(PIP) install --upgrade pip setuptools wheel
	$(PIP) install $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"])')
	mkdir -p $(STAMPS)
	touch $@

$(STAMPS)/lint: $(STAMPS)/venv pyproject.toml
	$(PIP) install --group lint
	touch $@

lint: $(STAMPS)/lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)

format: $(STAMPS)/lint
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP_FILES)

wheel: $(TORCH_STAMP)
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

# The wheel with CUDA kernels, built as a user builds it and installed into an environment of its own with the CUDA
# build of torch. Compiling and testing it need no GPU; tests/test_cuda_wheel.py looks at what is installed there.
CUDA_TORCH := 2.14.1
CUDA_VENV := .venv-cuda
CUDA_PYTHON := $(CUDA_VENV)/bin/python
CUDA_PIP := $(CUDA_PYTHON) -m pip --disable-pip-version-check
CUDA_STAMP := $(CUDA_VENV)/torch-$(CUDA_TORCH)
CUDA_WHEELS := dist/cuda
WHEEL_LIMIT := 60000000

wheel-cuda: $(CUDA_STAMP)
	rm -rf $(CUDA_WHEELS)
	RINGATTN_CUDA=1 $(CUDA_PIP) wheel --no-deps --wheel-dir $(CUDA_WHEELS) .
	$(CUDA_PIP) install --force-reinstall --no-deps $(CUDA_WHEELS)/*.whl
	$(CUDA_PIP) install "$$(echo $(CUDA_WHEELS)/*.whl)[test]"
	@size=$$(stat --format=%s $(CUDA_WHEELS)/*.whl); echo "$$(ls $(CUDA_WHEELS)/*.whl): $$size bytes"; \
	  test "$$size" -lt $(WHEEL_LIMIT) || { echo "make: a wheel has less than $(WHEEL_LIMIT) bytes"; exit 1; }

$(CUDA_STAMP):
	$(PYTHON3) -m venv --clear $(CUDA_VENV)
	$(CUDA_PIP) install --upgrade pip
	$(CUDA_PIP) install "torch==$(CUDA_TORCH)"
	nvcc --version 2> /dev/null | grep 'release 13\.' || $(CUDA_PIP) install $(NVCC) 'nvidia-cuda-cccl>=13'
	touch $@

# Host sources against the headers of TORCH without installing it: make check-headers TORCH=2.11.0. Not a part of CI,
# since it downloads 530 MB.
check-headers: $(STAMPS)/venv
	.ci/check_headers $(TORCH)

clean:
	rm -rf build dist python/*.egg-info python/ringattn_ext/_C*.so python/ringattn_ext/_build_info.py $(STAMPS)/built
