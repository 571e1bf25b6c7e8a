"""Addresses that go to a GPU and come back: in parameters, structs, arrays, variables and tensor maps."""

# ruff: noqa: E501 CUDA texts

import struct

import numpy as np
import pytest

from emulator import address, compile_cuda, encode_tiled, load
from emulator.hardware.driver import DriverError
from emulator.hardware.fake import FakeDriver
from emulator.hardware.pointers import Place, decode_map, from_device, moved_map, pointers, tensor_maps, to_device
from emulator.hardware.record import BITS
from emulator.tensor_map import DATA_TYPES
from emulator.test_hardware import recording

PLACES = [Place(1 << 52, 0x7F00_0000, 64), Place(2 << 52, 0x7F00_1000, 8)]


def words(*values):
    return struct.pack(f"<{len(values)}Q", *values)


def test_words():
    data = words(1 << 52, (1 << 52) + 63, (1 << 52) + 64, (1 << 52) + 65, (1 << 52) - 1, 5, 2 << 52)
    moved = words(0x7F00_0000, 0x7F00_003F, 0x7F00_0040, (1 << 52) + 65, (1 << 52) - 1, 5, 0x7F00_1000)
    assert [at for at, _ in pointers(data, PLACES)] == [0, 8, 16, 48]
    assert to_device(data, PLACES) == moved and from_device(moved, data, PLACES) == data
    assert to_device(b"\1" + data, PLACES)[1:] != moved  # pointers lie at multiples of 8
    assert to_device(b"1234567", PLACES) == b"1234567"
    # Where the emulator has no pointer, a number that looks like one of the GPU stays.
    assert from_device(moved, words(0) * 7, PLACES) == moved


SOURCE = r"""
struct Node { Node* next; int value; };
struct Pair { const float* in; float* out; };
extern "C" __global__ void list(Node* head, int* sum, Node** last) {
  Node* one = head;
  for (*sum = 0; one; one = one->next) { *sum += one->value; last[0] = one; }
  head->next = last[0];
}
extern "C" __global__ void pair(Pair p, float* end) { for (float* o = p.out; o != end; ++o) *o = *p.in++; }
__device__ int counter = 3;
__device__ int* where = &counter;
static __device__ int hidden[2];
__device__ __noinline__ int twice(int x) { return 2 * x; }
__device__ __noinline__ int square(int x) { return x * x; }
__device__ int (*table[2])(int) = {twice, square};
extern "C" __global__ void count(int* out) { out[0] = ++*where; out[1] = table[out[0] & 1](5); where = out; }
extern "C" __global__ void hide(int* out) { out[0] = ++hidden[0]; }
"""


@pytest.fixture(scope="module")
def kernels():
    return load(compile_cuda(SOURCE))


class Records(FakeDriver):
    """Remembers the parameters of launches; hides a variable."""

    def __init__(self):
        super().__init__()
        self.parameters = []

    def variable(self, module, name):
        return None if "hidden" in name else super().variable(module, name)

    def run(self, module, kernel, grid, block, shared_bytes, parameters):
        self.parameters.append(parameters)
        super().run(module, kernel, grid, block, shared_bytes, parameters)


def nodes(count):
    made = [np.zeros(1, np.dtype([("next", "u8"), ("value", "i4"), ("pad", "i4")])) for _ in range(count)]
    for i, node in enumerate(made):
        node["value"], node["next"] = 10**i, address(made[i + 1]) if i + 1 < count else 0
    return made


def test_pointers_in_memory(kernels):
    chain, driver = nodes(3), Records()
    total, last = np.zeros(1, np.int32), np.zeros(1, np.uint64)
    with recording(driver) as recorder:
        kernels.launch("list", block=1, args=[chain[0], total, last])
    assert total[0] == 111 and last[0] == chain[0]["next"][0] == address(chain[2])
    assert recorder.compared == {BITS: 1} and not recorder.differences
    given = struct.unpack("<3Q", driver.parameters[0])
    assert not {address(x) for x in (chain[0], total, last)} & set(given)


class Elsewhere(FakeDriver):
    def run(self, *launch):
        super().run(*launch)
        arena = next(data for start, data in self._memory.items() if start >> 40 >= 3000)
        found = arena.view(np.uint64)
        (start,) = [start for start in self._memory if start >> 40 >= 3000]
        inside = np.nonzero((found >= start) & (found < start + len(arena)))[0]
        found[inside[-1]] += np.uint64(8)


def test_a_pointer_to_another_place(kernels):
    chain, total, last = nodes(3), np.zeros(1, np.int32), np.zeros(1, np.uint64)
    with recording(Elsewhere()) as recorder:
        kernels.launch("list", block=1, args=[chain[0], total, last])
    (text,) = recorder.differences
    assert (
        f"argument 2 at {address(last):#x}[0]: emulator {address(chain[2]):#018x}, hardware {address(chain[2]) + 8:#018x}"
        in text
    )


def test_structs_and_ends(kernels):
    x, y = np.arange(40, dtype=np.float32), np.zeros(40, np.float32)
    with recording(FakeDriver()) as recorder:
        kernels.launch(
            "pair", block=1, args=[struct.pack("<QQ", address(x), address(y)), np.uint64(address(y) + y.nbytes)]
        )
    assert recorder.compared == {BITS: 1} and y[39] == 39


def test_numbers_are_not_pointers(kernels):
    """A double whose bits are an address stays what it is."""
    x, y = np.zeros(20), np.zeros(40, np.float32)
    x[:] = np.frombuffer(struct.pack("<Q", address(y)), np.float64)
    with recording(FakeDriver()) as recorder:
        kernels.launch(
            "pair", block=1, args=[struct.pack("<QQ", address(x), address(y)), np.uint64(address(y) + y.nbytes)]
        )
    assert recorder.compared == {BITS: 1}


def test_variables():
    kernels, out, driver = load(compile_cuda(SOURCE)), np.zeros(2, np.int32), Records()
    with recording(driver) as recorder:
        kernels.launch("count", block=1, args=[out])
        assert out.tolist() == [4, 10]
        kernels.launch("count", block=1, args=[out])  # where is out now
        assert out.tolist() == [5, 25]
        assert recorder.compared == {BITS: 2} and not recorder.differences
        for _ in range(2):
            kernels.launch("hide", block=1, args=[out])
    assert recorder.left_out == {"it writes a variable that the driver does not export": 2}


def test_variables_that_differ():
    class Wrong(FakeDriver):
        def run(self, module, *launch):
            super().run(module, *launch)
            np.frombuffer(module.variable("counter"), np.int32)[:] = 9

    kernels, out = load(compile_cuda(SOURCE)), np.zeros(2, np.int32)
    with recording(Wrong()) as recorder:
        kernels.launch("count", block=1, args=[out])
    assert "variable counter" in recorder.differences[0]


@pytest.mark.parametrize("dtype", DATA_TYPES)
def test_tensor_maps(dtype):
    x = np.zeros(4096, np.uint8)
    given = dict(
        size=(16, 8), strides=(256,), box=(16, 4), element_strides=(1, 2), swizzle="none", fill_nan="f" in dtype
    )
    data = bytes(64) + encode_tiled(x, dtype, **given, offset=16)
    ((at, found),) = tensor_maps(data)
    assert at == 64 and found == decode_map(data[64:])
    assert (found.data_type, found.address, found.size) == (DATA_TYPES.index(dtype), address(x) + 16, (16, 8))
    assert (found.strides, found.box, found.steps, found.swizzle) == ((256,), (16, 4), (1, 2), 0)
    assert FakeDriver().tensor_map(found) == data[64:]
    moved = moved_map(found, [Place(address(x), 0x7000, 4096)])
    assert moved.address == 0x7010 and moved.size == found.size
    assert tensor_maps(bytes(8) + data) == []  # a map lies at a multiple of 64


def test_a_map_that_the_driver_refuses():
    from emulator.tensor_kernels import load_kernel, module_text

    class Refuses(FakeDriver):
        def tensor_map(self, what):
            raise DriverError("CUDA_ERROR_INVALID_VALUE", "cuTensorMapEncodeTiled: invalid argument")

    x, out = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    encoded = encode_tiled(x, "u32", (64,), (), (64,))
    for driver in (FakeDriver(), Refuses()):
        with recording(driver) as recorder:
            load(module_text([load_kernel(1)])).launch("load1", args=[encoded, out, 256, 0])
        assert recorder.compared == ({} if isinstance(driver, Refuses) else {BITS: 1})
    assert "placing memory: CUDA_ERROR_INVALID_VALUE: cuTensorMapEncodeTiled" in recorder.differences[0]
