"""What can be wrong with a call, as a table: how to spoil one that is right, the error, and what its message says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from small_call import INPUTS

Call = dict[str, Any]
Errors = type[Exception] | tuple[type[Exception], ...]


class Row(NamedTuple):
    id: str
    spoil: Callable[[Call], Call]  # the arguments that change
    error: Errors
    message: str  # a regular expression, from the start
    doors: str = "python op virtual compile"


def change(**changes: Any) -> Callable[[Call], Call]:
    return lambda call: changes


def each(*names: str, to: Callable[[torch.Tensor], Any]) -> Callable[[Call], Call]:
    return lambda call: {name: to(call[name]) for name in names}


def documents(*bounds: int, dtype: torch.dtype = torch.int64) -> Callable[[Call], Call]:
    """Bounds of which -1 stands for seq_len."""
    return lambda call: {"cu_seqlens": torch.tensor([call["seq_len"] if b == -1 else b for b in bounds], dtype=dtype)}


def unequal(**mask: Any) -> Callable[[Call], Call]:
    """Twice as many keys as queries."""

    def spoil(call: Call) -> Call:
        key = torch.cat((call["key"], call["key"]), 2)
        documents = {"cu_seqlens": torch.tensor([0, 2 * call["seq_len"]])} if mask.get("cu_seqlens") else {}
        return {"key": key, "value": key, "key_seq_len": 2 * call["seq_len"]} | mask | documents

    return spoil


def fewer_heads(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1]


def wide(x: torch.Tensor) -> torch.Tensor:
    return x.new_ones(*x.shape[:3], 257)


NO_COMPILE = "python op virtual"  # dynamo does not trace such tensors
PYTHON = "python virtual"  # torch.ops has its own message for a wrong type
RING = "python op compile"  # virtual ranks have no such argument
TOO_LARGE = 2**70
DTYPES = "dtype float64, float32, bfloat16 or float16, got "
CROSS = r"is_causal, window, cu_seqlens: expected none of them for .* unequal lengths, seq_len \d+ and key_seq_len \d+"

ROWS = [
    # dtypes
    *[
        Row(
            f"{x} of another dtype",
            each(x, to=torch.Tensor.double),
            TypeError,
            f"{x}: expected the dtype of query, float32, got float64",
        )
        for x in ("key", "value")
    ],
    Row(
        "query of another dtype",
        each("query", to=torch.Tensor.bfloat16),
        TypeError,
        "key: expected the dtype of query, bfloat16, got float32",
    ),
    *[
        Row(
            f"{dtype} inputs",
            each(*INPUTS, to=lambda x, dtype=dtype: torch.zeros(x.shape, dtype=dtype)),
            TypeError,
            f"query: expected {DTYPES}{name}",
            NO_COMPILE,
        )
        for dtype, name in (
            (torch.int32, "int32"),
            (torch.bool, "bool"),
            (torch.complex64, "complex64"),
            (torch.float8_e4m3fn, "Float8_e4m3fn"),
        )
    ],
    # devices and kinds of tensors
    *[
        Row(
            f"{x} on another device",
            each(x, to=lambda x: x.to("meta")),
            ValueError,
            f"{x}: expected the device of query, cpu, got meta",
        )
        for x in ("key", "value")
    ],
    Row(
        "query on another device",
        each("query", to=lambda x: x.to("meta")),
        ValueError,
        "key: expected the device of query, meta, got cpu",
    ),
    Row(
        "sparse query",
        each("query", to=torch.Tensor.to_sparse),
        (TypeError, ValueError),
        "query: expected .*[Ss]parse",
        "python virtual",
    ),
    *[
        Row(
            f"{x} is {name}",
            each(x, to=lambda x, value=value: value),
            TypeError,
            rf"{x}: expected a Tensor, got (numpy\.)?{name}",
            PYTHON,
        )
        for x in INPUTS
        for value, name in ((None, "NoneType"), ([1.0], "list"), (np.zeros(3), "ndarray"))
    ],
    # shapes
    *[
        Row(
            f"{x} of 3 dimensions",
            each(x, to=lambda x: x[0]),
            ValueError,
            rf"{x}: expected 4 dimensions \[B, H, S, D\], got 3",
        )
        for x in INPUTS
    ],
    Row(
        "key of 5 dimensions",
        each("key", to=lambda x: x[None]),
        ValueError,
        r"key: expected 4 dimensions \[B, H, S, D\], got 5",
    ),
    *[
        Row(
            f"{x} of another batch size",
            each(x, to=lambda x: x[:1]),
            ValueError,
            f"{x}: expected the batch size of query, 2, got 1",
        )
        for x in ("key", "value")
    ],
    *[
        Row(
            f"{x} of another head_dim",
            each(x, to=lambda x: x[..., :4]),
            ValueError,
            f"{x}: expected the head_dim of query, 8, got 4",
        )
        for x in ("key", "value")
    ],
    Row(
        "value of other heads than key",
        each("value", to=fewer_heads),
        ValueError,
        "value: expected as many heads as key, 2, got 1",
    ),
    Row(
        "value of other length than key",
        each("value", to=lambda x: x[:, :, :-1]),
        ValueError,
        "value: expected as many tokens as key, ",
    ),
    Row(
        "heads no multiple",
        each("query", to=lambda x: x[:, :3]),
        ValueError,
        "query: expected a number of heads that is a multiple of the 2 heads of key and value, got 3",
    ),
    Row(
        "enable_gqa missing",
        change(enable_gqa=False),
        ValueError,
        "enable_gqa: expected True for 4 query heads over 2 key/value heads, got False",
    ),
    Row(
        "head_dim 0",
        each(*INPUTS, to=lambda x: x[..., :0]),
        ValueError,
        "query: expected a head_dim from 1 to 256, got 0",
    ),
    Row("head_dim 257", each(*INPUTS, to=wide), ValueError, "query: expected a head_dim from 1 to 256, got 257"),
    Row("no query heads", each("query", to=lambda x: x[:, :0]), ValueError, "query: expected at least one head, got 0"),
    Row(
        "no key heads",
        each("key", "value", to=lambda x: x[:, :0]),
        ValueError,
        "key: expected at least one head, got 0",
    ),
    Row(
        "too few queries",
        each("query", to=lambda x: x[:, :, :-1]),
        ValueError,
        r"query: expected 6 tokens on rank \d of \d \(layout 'zigzag', seq_len \d+\), got 5",
        RING,
    ),
    Row(
        "too many keys",
        lambda call: {
            "key": torch.cat((call["key"],) * 2, 2),
            "value": torch.cat((call["value"],) * 2, 2),
            "key_seq_len": call["seq_len"],
        },
        ValueError,
        r"key: expected 6 tokens on rank \d of \d \(layout 'zigzag', key_seq_len \d+\), got 12",
        RING,
    ),
    # lengths
    Row(
        "seq_len not of these tensors",
        lambda call: {"seq_len": call["seq_len"] + 4},
        ValueError,
        r"query: expected \d+ tokens .*got 6",
        RING,
    ),
    Row(
        "key_seq_len not of these tensors",
        lambda call: {"key_seq_len": call["seq_len"] + 4},
        ValueError,
        r"key: expected \d+ tokens .*got 6",
        RING,
    ),
    *[
        Row(
            f"{x} {value}",
            change(**{x: value}),
            ValueError,
            rf"{x}: expected a number from 0 to 2\^31 - 1, got {value}",
            RING,
        )
        for x in ("seq_len", "key_seq_len")
        for value in (-1, 2**31)
    ],
    *[
        Row(
            f"{x} beyond 64 bits",
            change(**{x: TOO_LARGE}),
            ValueError,
            f"{x}: expected a number .*, got {TOO_LARGE}",
            "python",
        )
        for x in ("seq_len", "key_seq_len")
    ],
    *[
        Row(
            f"{x} is a {type(value).__name__}",
            change(**{x: value}),
            TypeError,
            f"{x}: expected an int, got {type(value).__name__}",
            "python",
        )
        for x in ("seq_len", "key_seq_len")
        for value in (6.0, "6", True)
    ],
    # layout
    Row(
        "unknown layout",
        change(layout="spiral"),
        ValueError,
        "layout: expected 'contiguous', 'zigzag' or 'striped', got 'spiral'",
    ),
    Row("empty layout", change(layout=""), ValueError, "layout: expected 'contiguous', 'zigzag' or 'striped', got ''"),
    Row(
        "long layout",
        change(layout="x" + "é" * 300),
        ValueError,
        "layout: expected 'contiguous', 'zigzag' or 'striped', got 'xé+'",
    ),
    Row("layout that is no text", change(layout="\ud800"), ValueError, "layout: expected .*, got ", PYTHON),
    Row("layout not a string", change(layout=1), TypeError, "layout: expected a str, got int", PYTHON),
    # scale
    *[
        Row(f"scale {value}", change(scale=value), ValueError, rf"scale: expected a finite number above 0, got {text}")
        for value, text in (
            (float("nan"), "nan"),
            (float("inf"), "inf"),
            (float("-inf"), "-inf"),
            (0.0, "0"),
            (-0.0, "-?0"),
            (-1.0, "-1"),
        )
    ],
    Row("scale 0 as an int", change(scale=0), ValueError, "scale: expected a finite number above 0, got 0", PYTHON),
    Row("scale beyond a float", change(scale=10**400), ValueError, "scale: expected a finite number", PYTHON),
    *[
        Row(
            f"scale is a {type(value).__name__}",
            change(scale=value),
            TypeError,
            rf"scale: expected a float.*, got (torch\.)?{type(value).__name__}",
            PYTHON,
        )
        for value in ("1", True, torch.ones(1), 1j)
    ],
    # window
    Row("window left -2", change(window=(-2, 0)), ValueError, r"window: expected left >= -1 \(-1: unbounded\), got -2"),
    Row(
        "window right -2", change(window=(0, -2)), ValueError, r"window: expected right >= -1 \(-1: unbounded\), got -2"
    ),
    Row(
        "window right -2 under is_causal",
        change(window=(0, -2), is_causal=True),
        ValueError,
        "window: expected right >= -1",
    ),
    *[
        Row(
            f"window of {len(value)} entries",
            change(window=value),
            ValueError,
            rf"window: expected \(left, right\), got {len(value)} entries",
        )
        for value in ((), (1,), (1, 2, 3))
    ],
    *[
        Row(f"window {value!r}", change(window=value), TypeError, "window: expected (an int|two ints), got ", PYTHON)
        for value in ((1.0, 2), (None, 0), (True, 0), ("1", "2"))
    ],
    *[
        Row(
            f"window is a {type(value).__name__}",
            change(window=value),
            TypeError,
            rf"window: expected \(left, right\) or None, got (torch\.)?{type(value).__name__}",
            PYTHON,
        )
        for value in (3, "12", {1, 2}, torch.tensor([1, 2]))
    ],
    Row("window beyond 64 bits", change(window=(TOO_LARGE, 0)), ValueError, f"window: expected .*{TOO_LARGE}", PYTHON),
    # documents
    Row(
        "cu_seqlens of 2 dimensions",
        lambda call: {"cu_seqlens": torch.tensor([[0, call["seq_len"]]])},
        ValueError,
        r"cu_seqlens: expected one dimension with at least one entry, got shape \[1, 2\]",
    ),
    Row(
        "cu_seqlens of 0 dimensions",
        change(cu_seqlens=torch.tensor(0)),
        ValueError,
        r"cu_seqlens: expected one dimension .*got shape \[\]",
    ),
    Row("cu_seqlens empty", documents(), ValueError, r"cu_seqlens: expected one dimension .*got shape \[0\]"),
    *[
        Row(
            f"cu_seqlens of {dtype}",
            documents(0, -1, dtype=dtype),
            TypeError,
            f"cu_seqlens: expected dtype int32 or int64, got {name}",
        )
        for dtype, name in ((torch.float32, "float32"), (torch.int16, "int16"), (torch.bool, "bool"))
    ],
    Row("cu_seqlens not from 0", documents(1, -1), ValueError, "cu_seqlens: expected 0 as the first entry, got 1"),
    Row("cu_seqlens from below 0", documents(-3, -1), ValueError, "cu_seqlens: expected 0 as the first entry, got -3"),
    Row(
        "cu_seqlens decreasing",
        documents(0, 4, 3, -1),
        ValueError,
        "cu_seqlens: expected entries that do not decrease, got 3 after 4 at index 2",
    ),
    Row(
        "cu_seqlens too short",
        documents(0, 2, 5),
        ValueError,
        r"cu_seqlens: expected seq_len, \d+, as the last entry, got 5",
    ),
    Row(
        "cu_seqlens too long",
        documents(0, 2**40),
        ValueError,
        rf"cu_seqlens: expected seq_len, \d+, as the last entry, got {2**40}",
    ),
    Row(
        "cu_seqlens of one entry",
        documents(0),
        ValueError,
        r"cu_seqlens: expected seq_len, \d+, as the last entry, got 0",
    ),
    Row("cu_seqlens a list", change(cu_seqlens=[0, 6]), TypeError, "cu_seqlens: expected a Tensor.*, got list", PYTHON),
    Row(
        "cu_seqlens on meta",
        lambda call: {"cu_seqlens": torch.tensor([0, call["seq_len"]]).to("meta")},
        (TypeError, ValueError),
        "cu_seqlens: expected .*meta",
        NO_COMPILE,
    ),
    Row(
        "cu_seqlens sparse",
        lambda call: {"cu_seqlens": torch.tensor([0, call["seq_len"]]).to_sparse()},
        (TypeError, ValueError),
        "cu_seqlens: expected .*[Ss]parse",
        PYTHON,
    ),
    # unequal lengths
    *[
        Row(f"cross attention with {name}", unequal(**mask), ValueError, CROSS, "python op virtual")
        for name, mask in (
            ("is_causal", {"is_causal": True}),
            ("window", {"window": (3, 3)}),
            ("documents", {"cu_seqlens": True}),
        )
    ],
    # flags
    *[
        Row(
            f"{x} {value!r}",
            change(**{x: value}),
            TypeError,
            f"{x}: expected a bool, got {type(value).__name__}",
            PYTHON,
        )
        for x in ("is_causal", "enable_gqa", "deterministic")
        for value in (1, None, "yes")
    ],
]
BY_ID = {row.id: row for row in ROWS}
assert len(BY_ID) == len(ROWS)
