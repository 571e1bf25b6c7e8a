"""The wheel with CUDA kernels, as `make wheel-cuda` installed it into .venv-cuda: what can be known without a GPU.

What it says runs in fresh processes of that environment, outside the tree. Where there is no such environment the tests
are skipped; with CI_CUDA_WHEEL=1 they fail.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-cuda"
PYTHON = ENVIRONMENT / "bin" / "python"
LIMIT = 60_000_000  # bytes, with all default architectures
SUFFIXES = {".cmake", ".cpp", ".cu", ".h", ".py"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# A tensor that says cuda:0 over the memory of the CPU: real to the dispatcher, and no driver is asked for it.
CUDA_TENSOR = """
def on_cuda(host):
    storage = torch._C._construct_storage_from_data_pointer(host.data_ptr(), torch.device("cuda:0"), host.nbytes)
    about = {"size": host.shape, "stride": host.stride(), "dtype": host.dtype, "storage_offset": 0}
    about["device"] = torch.device("cuda:0")
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(about, storage)
"""


def missing() -> str:
    """Why there is nothing to test."""
    wheels = sorted((ROOT / "dist" / "cuda").glob("*.whl"))
    if not PYTHON.exists() or not wheels:
        return "there is no wheel with CUDA kernels; make wheel-cuda builds and installs it"
    files = [path for name in ("csrc", "python", "third_party") for path in (ROOT / name).rglob("*.*")]
    sources = [path for path in files if path.suffix in SUFFIXES and path.name != "_build_info.py"]
    newest = max(sources, key=lambda path: path.stat().st_mtime)
    if newest.stat().st_mtime > wheels[0].stat().st_mtime:
        return f"{newest.relative_to(ROOT)} is newer than the wheel with CUDA kernels; make wheel-cuda"
    return ""


@pytest.fixture(scope="module")
def wheel() -> Path:
    reason = missing()
    if reason and os.environ.get("CI_CUDA_WHEEL") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    (path,) = (ROOT / "dist" / "cuda").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def module(wheel: Path) -> Path:
    (path,) = ENVIRONMENT.glob("lib/python3*/site-packages/ringattn_ext/_C*.so")
    return path


def run(code: str, tmp_path: Path) -> object:
    """The value of `result` after this code, in the environment of the wheel and outside the tree."""
    text = f"import torch\nimport ringattn_ext as ra\n{code}\nprint(repr(result))"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [PYTHON, "-c", text], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout.splitlines()[-1])


def build_info(module: Path) -> dict[str, object]:
    info: dict[str, object] = {}
    exec((module.parent / "_build_info.py").read_text(), info)
    return info


def test_it_is_imported_without_a_driver(wheel: Path, tmp_path: Path) -> None:
    file, version = run("result = (ra.__file__, torch.version.cuda)", tmp_path)  # type: ignore[misc]
    assert Path(file).is_relative_to(ENVIRONMENT)
    assert version is not None


def test_what_it_was_built_with(module: Path) -> None:
    info = build_info(module)
    assert info["CUDA"] is not None and info["NO_CUDA"] is None
    assert str(info["NVCC"]).split(".")[0] == str(info["CUDA"]).split(".")[0]
    archs = info["ARCHS"]
    assert isinstance(archs, tuple) and archs and info["PTX"] == archs[-1]
    asked = os.environ.get("RINGATTN_ARCHS")
    if asked:
        assert archs == tuple(sorted({int(word) for word in re.findall(r"\d+", asked)}))


def test_size(wheel: Path) -> None:
    print(f"{wheel.name}: {wheel.stat().st_size} bytes")
    assert wheel.stat().st_size < LIMIT


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_the_runtime_is_torchs(module: Path, tmp_path: Path) -> None:
    """By soname, from wherever torch loaded it: one runtime, one current device. No library of the driver is needed."""
    dynamic = subprocess.check_output(["readelf", "-d", module], text=True, timeout=60)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    (runtime,) = [name for name in needed if "cudart" in name]
    assert not [name for name in needed if re.match(r"libcuda\.|libtorch_cuda|libc10_cuda|libpython", name)], needed
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    symbols = subprocess.check_output(["readelf", "--dyn-syms", "--wide", module], text=True, timeout=60)
    assert re.search(r"\bUND cudaLaunchKernel\b", symbols)
    loaded = run(
        "maps = open('/proc/self/maps').read().split()\n"
        "result = sorted({path.rsplit('/', 1)[-1] for path in maps if 'cudart' in path})",
        tmp_path,
    )
    assert loaded == [runtime]


def cuobjdump(module: Path, *options: str) -> str:
    (program,) = ENVIRONMENT.glob("lib/python3*/site-packages/nvidia/**/bin/cuobjdump")
    return subprocess.check_output([program, *options, module], text=True, timeout=240)


def kernel_files() -> list[str]:
    """The list of csrc/cuda/sources.cmake."""
    (text,) = re.findall(r"set\(ringattn_cuda_kernels\n(.*?)\)", (ROOT / "csrc/cuda/sources.cmake").read_text(), re.S)
    return text.split()


def test_machine_code_of_all_architectures_and_ptx_of_the_newest(module: Path) -> None:
    info = build_info(module)
    archs, count = info["ARCHS"], len(kernel_files())
    assert isinstance(archs, tuple)
    for option, expected in (("--list-elf", archs), ("--list-ptx", archs[-1:])):
        found = re.findall(r"\.sm_(\d+\w*)\.", cuobjdump(module, option))
        assert {arch: found.count(arch) for arch in found} == {str(arch): count for arch in expected}


def test_every_kernel_is_there(module: Path) -> None:
    info = build_info(module)
    symbols = cuobjdump(module, "--dump-elf-symbols", "--gpu-architecture", f"sm_{info['PTX']}")
    entries = set(re.findall(r"\bENTRY\s+(\w+)", symbols))
    assert entries == {f"ringattn_{name}" for name in kernel_files()}


def test_every_operator_that_takes_tensors_runs_on_cuda(wheel: Path, tmp_path: Path) -> None:
    """All but those whose only tensor is `order`, which is on the CPU, and those that take none."""
    code = """
names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("ringattn::"))
def takes_tensors(name):
    schema = getattr(torch.ops.ringattn, name.partition("::")[2]).default._schema
    return any("Tensor" in str(one.type) and one.name != "order" for one in schema.arguments)
has = torch._C._dispatch_has_computed_kernel_for_dispatch_key
result = [(name, takes_tensors(name), has(name, "CPU"), has(name, "CUDA")) for name in names]
"""
    operators = run(code, tmp_path)
    assert isinstance(operators, list)
    assert {"ringattn::ring_forward", "ringattn::shard", "ringattn::merge_"} <= {name for name, *_ in operators}
    for name, takes_tensors, on_cpu, on_cuda in operators:
        assert on_cpu, name
        assert on_cuda or not takes_tensors, name


FAKES = """
from torch._subclasses.fake_tensor import FakeTensorMode

def fake(heads):
    return torch.empty(2, 96, heads, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

def about(tensors):
    return [(x.device.type, str(x.dtype), tuple(x.shape)) for x in tensors]
"""
OUT, LSE = ("cuda", "torch.bfloat16", (2, 4, 96, 64)), ("cuda", "torch.float32", (2, 4, 96))
GRAD_KEY = ("cuda", "torch.bfloat16", (2, 2, 96, 64))
ATTEND = {
    "ring": "ra.ring_attention(query, key, value, is_causal=True, enable_gqa=True, return_lse=True)",
    "virtual": "ra.virtual_ring_attention(query, key, value, world_size=3, enable_gqa=True, return_lse=True)",
}


@pytest.mark.parametrize("kind", ATTEND)
def test_forward_and_backward_on_fake_tensors(wheel: Path, tmp_path: Path, kind: str) -> None:
    """Which have a device and no memory. The node's backward is called, since autograd's engine asks for the driver."""
    code = f"""{FAKES}
with FakeTensorMode():
    query, key, value = (fake(heads).requires_grad_() for heads in (4, 2, 2))
    out, lse = {ATTEND[kind]}
    gradients = out.grad_fn.apply(torch.empty_like(out), torch.empty_like(lse))
result = about([out, lse, *gradients[:3]])
"""
    assert run(code, tmp_path) == [OUT, LSE, OUT, GRAD_KEY, GRAD_KEY]


def test_torch_compile_on_fake_tensors(wheel: Path, tmp_path: Path) -> None:
    code = f"""{FAKES}
def attend(query, key, value):
    return *{ATTEND["ring"]}, *{ATTEND["virtual"]}

with FakeTensorMode(allow_non_fake_inputs=True):  # the ring's order is a constant of the compiled code
    result = about(torch.compile(attend, fullgraph=True, backend="aot_eager")(fake(4), fake(2), fake(2)))
"""
    assert run(code, tmp_path) == [OUT, LSE, OUT, LSE]


def test_a_machine_without_a_driver_is_named(wheel: Path, tmp_path: Path) -> None:
    code = f"""{CUDA_TENSOR}
query = torch.randn(1, 2, 64, 64).to(torch.bfloat16)
result = []
def virtual(x):
    return ra.virtual_ring_attention(x, x, x, world_size=2)
for call in () if torch.cuda.is_available() else (ra.ring_attention, virtual):
    try:
        call(*[on_cuda(query)] * (3 if call is ra.ring_attention else 1))
    except Exception as error:
        result.append((type(error).__name__, str(error)))
"""
    refusals = run(code, tmp_path)
    assert isinstance(refusals, list)
    if not refusals:
        pytest.skip("there is a GPU")
    for kind, text in refusals:
        assert kind == "NotImplementedError"
        assert "query: cuda:0 cannot be used: no NVIDIA driver was found" in text
