"""Runs CUDA kernels on the CPU from the PTX that nvcc emits. README.md says how to add instructions and how to debug.

module = load(compile_cuda(source, arch="sm_80"))
report = module.launch("kernel", grid=(1, 1, 1), block=(128, 1, 1), args=[array, 5])
"""

from .build import EmulatorError
from .compile import compile_cuda
from .module import Module, Report, address, load
from .tensor_map import encode_tiled

__all__ = ["EmulatorError", "Module", "Report", "address", "compile_cuda", "encode_tiled", "load"]
