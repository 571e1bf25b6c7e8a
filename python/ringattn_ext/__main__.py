"""Commands of the package.

python -m ringattn_ext doctor [--json]: why an installation does not work, and what mends it
python -m ringattn_ext shapes [--arch N]: the tile shapes of the CUDA kernels
"""

from __future__ import annotations

import argparse
import sys

from ringattn_ext import _doctor
from ringattn_ext._load import load

KERNELS = ("forward", "backward_keys", "backward_queries")
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
HEAD_DIMS = (64, 128, 256)
COLUMNS = ("queries", "keys", "score_columns", "warps", "tiles_per_warp", "column_warps", "stages", "blocks")


def shapes(architectures: list[int]) -> str:
    """A line for each kernel, architecture and head_dim; what the columns say stands in csrc/cuda/shapes.h."""
    load()
    from ringattn_ext import _C

    lines: list[tuple[str, ...]] = [("kernel", "arch", "head_dim", *COLUMNS, "shared_bytes")]
    for kernel in KERNELS:
        for arch in architectures:
            for head_dim in HEAD_DIMS:
                shape = _C.tile_shape(kernel, arch, head_dim)
                numbers = [arch, head_dim, *(getattr(shape, column) for column in COLUMNS)]
                numbers.append(_C.tile_shared_bytes(kernel, arch, head_dim))
                lines.append((kernel, *map(str, numbers)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(word.rjust(w) for word, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m ringattn_ext", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "doctor", help="what is wrong with an installation", description=_doctor.__doc__, formatter_class=raw
    )
    command.add_argument("--json", action="store_true", help="one JSON object, its keys as above")
    command = commands.add_parser("shapes", help="tile shapes of the CUDA kernels")
    command.add_argument("--arch", type=int, action="append", help="as in 80; may be repeated")
    arguments = parser.parse_args()
    if arguments.command == "doctor":
        sys.exit(_doctor.run(as_json=arguments.json))
    print(shapes(arguments.arch or list(ARCHITECTURES)))


if __name__ == "__main__":
    main()
