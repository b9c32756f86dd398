"""What kernels are predicted to take on an H200 is what they took there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.simulation.device.attention import NARROW, WIDE
from deploy.simulation.device.fake_device import Kernel
from deploy.simulation.device.prediction import kernel_seconds
from deploy.simulation.device.speeds import H200
from workers.forward.triton.tiles import SPLIT_KEYS

MEASURED = Path(__file__).parents[3] / "bench/results/device-h200.json"
HEADS, KV_HEADS, DIM, ELEMENT = 32, 8, 128, 2
"""Llama-3.1-8B in bfloat16."""
MATRICES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def measured(title: str, column: str, *row: str) -> float:
    """A cell of the device run, by the beginning of its table's title, its column and the first cells of its row."""
    (table,) = (one for one in json.loads(MEASURED.read_text())["tables"] if one["title"].startswith(title))
    (cells,) = (one for one in table["rows"] if tuple(one[: len(row)]) == row)
    return float(cells[table["columns"].index(column)])


def microseconds(*kernels: Kernel) -> float:
    return 1e6 * sum(kernel_seconds(kernel, H200) for kernel in kernels)


@pytest.mark.parametrize(
    ("rows", "stored", "tokens", "within"),
    [
        *((1, 128, 1, 0.05), (1, 2048, 1, 0.05), (8, 128, 1, 0.05), (8, 2048, 1, 0.05), (64, 2048, 1, 0.08)),
        *((64, 128, 1, 0.2), (64, 2048, 8, 0.05), (8, 2048, 8, 0.3)),
    ],
)
def test_attention_of_decoding_and_verification(rows: int, stored: int, tokens: int, within: float) -> None:
    """Eight tokens were two tiles then, each of which read the keys."""
    column = f"{rows} row{'s' * (rows > 1)} × {stored}" if (rows, stored) == (1, 128) else f"{rows} × {stored}"
    column += ", 8 tokens each" * (tokens == 8)
    found = measured("Attention of a layer alone, µs (32", column, "4; 64, 4, 3, 128")
    tiles = -(-tokens // 4)
    moved = rows * stored * 2 * KV_HEADS * DIM * ELEMENT * tiles
    flops = 4 * HEADS * DIM * rows * stored * tokens
    assert microseconds(Kernel(NARROW, moved, flops, min(stored, SPLIT_KEYS))) == pytest.approx(found, rel=within)


@pytest.mark.parametrize(
    ("column", "rows", "stored", "tokens"),
    [("2,048 tokens", 1, 0, 2048), ("2,048 after 16,384", 1, 16384, 2048), ("8 × 512", 8, 0, 512)],
)
def test_attention_of_prompts(column: str, rows: int, stored: int, tokens: int) -> None:
    pairs = rows * (stored * tokens + tokens * (tokens + 1) // 2)
    found = measured("Attention of prompts", column, "64, 4, 3")
    assert microseconds(Kernel(WIDE, 0, 4 * HEADS * DIM * pairs)) == pytest.approx(found, rel=0.06)


@pytest.mark.parametrize(
    ("row", "name", "number_bytes", "column", "within"),
    [
        *(("all four", "mm", 2.0, "cuBLAS, bfloat16", within) for within in (0.05, 0.12)),
        *(("all four", "group_product", 0.5 + 4 / 128, "ours", within) for within in (0.05, 0.2)),
        *(("gate_up", name, size, column, 0.05) for name, size, column in (
            ("mm", 2.0, "cuBLAS, bfloat16"), ("group_product", 0.5 + 4 / 128, "ours"),
        )),
    ],
)  # fmt: skip
def test_products(row: str, name: str, number_bytes: float, column: str, within: float) -> None:
    rows = 2048 if row == "gate_up" else 1 if within == 0.05 else 64
    shapes = MATRICES.values() if row == "all four" else [MATRICES["gate_up"]]
    kernels = [Kernel(name, int(out * into * number_bytes), 2 * rows * out * into) for out, into in shapes]
    matrix = row if row == "all four" else "gate_up 28672x4096"
    assert microseconds(*kernels) == pytest.approx(measured("Products of", column, matrix, str(rows)), rel=within)


@pytest.mark.parametrize(("tokens", "within"), [(1, 0.05), (8, 0.05), (64, 0.05), (512, 0.12)])
def test_experts(tokens: int, within: float) -> None:
    """Two products, the route before and the sum behind."""
    experts = measured("Experts of a layer", "experts read", str(tokens))
    moved, flops = 3 * 768 * 2048 * ELEMENT * experts, 2 * 3 * 768 * 2048 * 8 * tokens
    products = (Kernel("multiply_tiles", int(share * moved), int(share * flops)) for share in (2 / 3, 1 / 3))
    found = measured("Experts of a layer", "ours", str(tokens))
    assert microseconds(*products, Kernel("route_expert", 0), Kernel("add_rows", 0)) == pytest.approx(found, rel=within)


def test_the_layers_products_of_a_step_of_one_row() -> None:
    kernels = [Kernel("mm", out * into * ELEMENT) for out, into in MATRICES.values()] * 32
    found = measured("Device time of a step", "products of the layers")
    assert microseconds(*kernels) / 1e3 == pytest.approx(found, rel=0.01)
