"""The wrapper of libcuda against cuda.h and a libcuda of the host's memory; the process with the GPU; pytest's side."""

import functools
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from emulator.compile import find_nvcc, include_folders
from emulator.hardware import driver as wrapper
from emulator.hardware.driver import CudaDriver, DriverError, NoDriver, TensorMap
from emulator.hardware.fake import FakeDriver
from emulator.hardware.job import Array, Job, ptx_version
from emulator.hardware.worker import Worker

TESTS = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def header(tmp_path_factory):
    """cuda.h, where nvcc finds it."""
    nvcc = find_nvcc() or pytest.skip("no nvcc")
    source = tmp_path_factory.mktemp("header") / "it.cu"
    source.write_text("#include <cuda.h>\n")
    folders = [word for folder in include_folders() for word in ("-I", folder)]
    done = subprocess.run([nvcc, "-M", *folders, source], capture_output=True, text=True, check=True)
    return Path(re.search(r"\S+/cuda\.h", done.stdout)[0])


def test_prototypes(header):
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    for name, prototype in wrapper.PROTOTYPES.items():
        base = name.removesuffix("_v2")
        (given,) = re.findall(rf"^CUresult CUDAAPI {base}\((.*?)\);", text, re.DOTALL | re.MULTILINE)[:1]
        words = [
            re.sub(r"\s*\b[A-Za-z_]\w*$", "", one.strip()) if one.strip() != "void" else "void"
            for one in given.split(",")
        ]
        assert [re.sub(r"\s*\*", "*", one) for one in words] == [
            re.sub(r"\s*\*", "*", one.strip()) for one in prototype.split(",")
        ], name
        versioned = re.findall(rf"#define {base}\s+(?:__CUDA_API_PTDS\()?({base}_v\d)", text)
        assert (versioned or [base])[0] == name
    for value, enumerator in (
        (wrapper.COMPUTE_CAPABILITY_MAJOR, "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"),
        (wrapper.COMPUTE_CAPABILITY_MINOR, "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"),
        (wrapper.ERROR_LOG_BUFFER, "CU_JIT_ERROR_LOG_BUFFER"),
        (wrapper.ERROR_LOG_BUFFER_SIZE_BYTES, "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES"),
        (wrapper.MAX_DYNAMIC_SHARED_SIZE_BYTES, "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"),
        (wrapper.LIMIT_STACK_SIZE, "CU_LIMIT_STACK_SIZE"),
        (wrapper.CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND"),
        (wrapper.PARAM_BUFFER_POINTER, "CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT"),
        (wrapper.PARAM_BUFFER_SIZE, "CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT"),
    ):
        found = re.findall(rf"{enumerator}\s*=?\s*(0x\w+|\d+)", text)
        assert [int(one, 0) for one in found][:1] == [value], enumerator


@pytest.fixture(scope="module")
def library(header, tmp_path_factory):
    compiler = shutil.which("gcc") or pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    source = Path(__file__).parent / "fake_cuda.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-I", header.parent, source, "-o", path], check=True
    )
    return str(path)


def test_calls(library):
    driver = CudaDriver(library)
    assert (driver.name, driver.capability, driver.version) == ("a GPU of the host", 90, 13000)
    module = driver.load(".version 9.0\n")
    address = driver.allocate(40)
    x = np.arange(10, dtype=np.float32)
    driver.write(address, x.tobytes())
    driver.run(module, "scale", (1, 2, 3), (4, 5, 6), 99 * 1024, struct.pack("<Qif", address, 9, 2.5))
    assert np.frombuffer(driver.read(address, 40), np.float32).tolist() == [*(x[:9] * 2.5), 9]
    assert driver.variable(module, "variable")[1] == 16 and driver.variable(module, "other") is None
    driver.free(address)
    driver.unload(module)
    with pytest.raises(
        DriverError, match="CUDA_ERROR_INVALID_PTX: cuModuleLoadDataEx: in words\nptxas error: nonsense"
    ):
        driver.load("nonsense")
    with pytest.raises(DriverError) as caught:
        driver.run(module, "unknown", (1, 1, 1), (1, 1, 1), 0, b"")
    assert caught.value.name == "CUDA_ERROR_LAUNCH_FAILED"
    what = TensorMap(9, 0x1000, (16, 8), (256,), (16, 4), (1, 2), 3, 1)
    assert struct.unpack("<16Q", driver.tensor_map(what))[:9] == (9, 2, 0x1000, 8, 256, 4, 2, 3, 1)


def test_no_driver(library, monkeypatch):
    with pytest.raises(NoDriver, match=r"^no CUDA driver: /nowhere/libcuda.so.1: [^\n]*$"):
        CudaDriver("/nowhere/libcuda.so.1")
    monkeypatch.setenv("NO_GPU", "1")
    with pytest.raises(NoDriver, match=r"^no CUDA GPU: CUDA_ERROR_NO_DEVICE: cuInit: in words$"):
        CudaDriver(library)


def test_ptx_versions():
    versions = {12000: "8.0", 12040: "8.4", 12050: "8.5", 12060: "8.5", 12080: "8.7", 12090: "8.8", 13000: "9.0"}
    assert {version: ptx_version(version) for version in versions} == versions


# ---- the process that owns the GPU


class Hangs(FakeDriver):
    def run(self, module, kernel, *launch):
        if kernel == "hang":
            time.sleep(1000)
        if kernel == "die":
            os._exit(3)
        super().run(module, kernel, *launch)


PTX = """.version 9.0
.target sm_80
.address_size 64
.visible .entry hang() { ret; } .visible .entry die() { ret; } .visible .entry stop() { trap; }
.visible .entry set(.param .u64 x) { .reg .b64 p; ld.param.u64 p, [x]; st.global.b32 [p], 7; ret; }
"""


def job(kernel):
    arrays = [Array(1 << 52, "x", bytes(8))] if kernel == "set" else []
    return Job(PTX, kernel, (1, 1, 1), (1, 1, 1), 0, struct.pack("<Q", 1 << 52) if arrays else b"", arrays, [])


def missing_driver():
    raise NoDriver("no CUDA driver: it is not there")


def test_worker():
    worker = Worker(Hangs, timeout=30)
    try:
        assert worker.capability == 90 and worker.run(job("set")).arrays == [struct.pack("<Q", 7)]
        for kernel, error in (("stop", "CUDA_ERROR_LAUNCH_FAILED"), ("die", "DIED"), ("hang", "HANGS")):
            worker._timeout = 2 if kernel == "hang" else 30
            outcome = worker.run(job(kernel))
            assert (outcome.error, outcome.stage) == (error, "run"), outcome
            worker._timeout = 30
            assert worker.run(job("set")).arrays == [struct.pack("<Q", 7)], f"after {kernel}"
    finally:
        worker.close()
    with pytest.raises(NoDriver, match="it is not there"):
        Worker(missing_driver)


def test_worker_with_libcuda(library):
    worker = Worker(functools.partial(CudaDriver, library))
    try:
        assert worker.name == "a GPU of the host"
        assert worker.run(job("unknown")).error == "CUDA_ERROR_LAUNCH_FAILED"
    finally:
        worker.close()


# ---- pytest's side

RUN = """
import numpy as np
from emulator import load
from emulator.test_hardware import ONE

def test_one():
    x = np.ones(32, np.float32)
    load(ONE.format(instruction="add.rn.f32 b, a, a;", target="sm_80")).launch("one", args=[x, x.copy()])
"""
CONFTEST = """
def pytest_configure(config):
    from emulator.hardware import plugin
    from emulator.test_hardware import Changed, flip
    if {planted}:
        plugin.FakeDriver = lambda: Changed(flip(0))
    plugin.register(config)
"""


@pytest.mark.parametrize("mode, planted, code, words", [
    ("fake", False, 0, "1 launches compared, 0 left out, 0 different"),
    ("fake", True, 1, "0 launches compared, 0 left out, 1 different"),
    ("yes", False, 4, "RINGATTN_HARDWARE=yes: expected 1 or fake, got 'yes'"),
    ("", False, 0, "1 passed"),
])  # fmt: skip
def test_runs_of_pytest(tmp_path, mode, planted, code, words):
    (tmp_path / "test_it.py").write_text(RUN)
    (tmp_path / "conftest.py").write_text(CONFTEST.format(planted=planted))
    environment = os.environ | {"PYTHONPATH": str(TESTS), "RINGATTN_HARDWARE": mode}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code and words in done.stdout + done.stderr, done.stdout + done.stderr
    assert ("different: one in test_it.py::test_one" in done.stdout) == planted
    assert ("hardware" in done.stdout) == (mode == "fake")
