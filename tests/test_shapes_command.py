"""python -m ringattn_ext shapes prints the table by which kernels are compiled and launched."""

import subprocess
import sys

from ringattn_ext import _C


def test_the_command_prints_every_shape():
    done = subprocess.run(
        [sys.executable, "-m", "ringattn_ext", "shapes", "--arch", "80", "--arch", "89"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    header, *lines = (line.split() for line in done.stdout.splitlines())
    assert len(lines) == 3 * 2 * 3
    for line in lines:
        found = dict(zip(header, line, strict=True))
        kernel, arch, head_dim = found.pop("kernel"), int(found.pop("arch")), int(found.pop("head_dim"))
        shape = _C.tile_shape(kernel, arch, head_dim)
        assert int(found.pop("shared_bytes")) == _C.tile_shared_bytes(kernel, arch, head_dim)
        assert found == {name: str(getattr(shape, name)) for name in found} and len(found) == 8
