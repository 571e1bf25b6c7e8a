"""Tests of the package on a GPU: all are marked gpu, and skipped with the reason where there is none.

RINGATTN_GPU_TESTS_ON=cpu runs their bodies with CPU tensors, and gloo for NCCL: a check of the tests themselves. What
only a GPU has (streams, graphs) is skipped then.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .on_device import DEVICE, no_gpu

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if FOLDER in item.path.parents]
    reason = no_gpu() if ours and DEVICE == "cuda" else ""
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA GPU: {reason}"))


@pytest.fixture
def device() -> torch.device:
    return torch.device(DEVICE)


@pytest.fixture
def cuda_only() -> None:
    if DEVICE != "cuda":
        pytest.skip("needs CUDA streams or graphs")
