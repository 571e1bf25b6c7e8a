#!/bin/bash
# Everything that needs a GPU, in one command of at most 8 minutes, without a network: builds for the GPU that is there,
# holds the emulator against it instruction by instruction, runs the tests of tests/gpu (virtual rings of 1 to 8, real
# NCCL ranks on one GPU where NCCL permits that), compute-sanitizer on tiny rings, and times the kernels beside torch's.
#
#   bench/gpu_check.sh [folder for the results, default build/gpu_check/results]
#
# Needs nvcc, g++, and a Python (PYTHON, default python3) with torch 2.11 or newer of the same CUDA major version,
# setuptools, cmake, ninja, numpy, pytest, pytest-timeout and hypothesis; triton and compute-sanitizer are used where
# they are. Results: check.txt (this output), steps.json (each step: passed, failed or not run, and its seconds),
# timing.json. The exit status is 0 if nothing failed.
set -uo pipefail
cd "$(dirname "$0")/.."
work=$PWD/build/gpu_check
results=$(realpath -m "${1:-$work/results}")
python=${PYTHON:-python3}
mkdir -p "$work" "$results"
exec > >(tee "$results/check.txt") 2>&1

arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .) || exit 1
export MAX_JOBS=${MAX_JOBS:-$(nproc)} RINGATTN_CUDA=1 RINGATTN_ARCHS=$arch PYTHONUNBUFFERED=1
export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}

failed=0
steps=()
step() { # name, seconds it may take, command …
  local name=$1 limit=$2 begin=$SECONDS status=0
  shift 2
  local left=$((480 - SECONDS))
  printf '\n=== %s (after %d s)\n' "$name" "$SECONDS"
  timeout --kill-after=5 $((limit < left ? limit : left > 1 ? left : 1)) "$@" || status=$?
  local word=passed
  if [ "$status" -eq 77 ]; then
    word="not run"
  elif [ "$status" -ne 0 ]; then
    word="failed ($status)"
    failed=1
  fi
  printf '=== %s: %s in %d s\n' "$name" "$word" $((SECONDS - begin))
  steps+=("{\"step\": \"$name\", \"result\": \"$word\", \"seconds\": $((SECONDS - begin))}")
}

versions() {
  nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,memory.total --format=csv,noheader
  nvcc --version | grep release
  git rev-parse HEAD 2> /dev/null || true
  # Fails where torch cannot use the GPU: the tests would skip themselves.
  "$python" -c 'import torch; print("torch", torch.__version__, "nccl", torch.cuda.nccl.version(), torch.zeros(1).cuda())'
}

build() {
  rm -rf "$work/site"
  "$python" -m pip install --quiet --no-index --no-build-isolation --no-deps --target "$work/site" . &&
    "$python" -m ringattn_ext doctor
}

tests() { "$python" -m pytest -p no:cacheprovider -q "$@"; }

sanitizer() {
  if ! command -v compute-sanitizer > /dev/null; then
    echo "compute-sanitizer is not installed"
    return 77
  fi
  # memcheck: reads and writes out of bounds; racecheck: of shared memory; synccheck: barriers; initcheck would need
  # every buffer to be written before it is read, padding too.
  for tool in memcheck racecheck synccheck; do
    compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" bench/tiny_rings.py || return 1
  done
}

export -f build versions sanitizer tests
export work python

step "versions" 60 bash -c versions
[ "$failed" -eq 0 ] || exit 1
step "build for sm_$arch" 240 bash -c build
step "the emulator against the hardware" 200 env RINGATTN_HARDWARE=1 bash -c 'tests tests/emulator tests/cuda/test_forward.py'
step "correctness" 150 bash -c 'tests tests/gpu'
step "sanitizer" 90 bash -c sanitizer
step "timing" 120 env CUDA_DEVICE_MAX_CONNECTIONS=32 "$python" bench/gpu_timing.py --json "$results/timing.json"
(IFS=, && printf '[%s]\n' "${steps[*]}") > "$results/steps.json"
printf '\n%d s in all; results in %s\n' "$SECONDS" "$results"
exit "$failed"
