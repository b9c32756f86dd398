"""The layers of a drafting module in one call of the kernels compute what torch computes with the same weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from tests.support.engines.kept_kernels import NARROW, portable
from workers.forward.native import build, window_layers
from workers.forward.native.window_layers import LayerWeights, WindowPiece, WindowShape, pack_window_layers
from workers.forward.weights.choice import INT4, stored_as

DTYPES = (torch.float32, torch.bfloat16, torch.int8, INT4)
CPU_CODE = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
LAYERS, HIDDEN, INNER, SLOTS = 2, 56, 72, 150


def shape_of(heads: int, kv_heads: int, head_width: int, theta: float, factor: float = 1.0) -> WindowShape:
    half = head_width // 2
    return WindowShape(heads, kv_heads, head_width, 1e-5, theta ** (-torch.arange(half) / half), factor)


SHAPES = (shape_of(4, 2, 16, 10000.0), shape_of(3, 1, 34, 500.0), shape_of(6, 2, 64, 1e5, 1.3))
"""Not all heads fill vectors, and one rotation has a factor."""


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * shape[-1] ** -0.5


def weights_of(shape: WindowShape, seed: int = 0) -> LayerWeights:
    attended = shape.heads * shape.head_width
    return LayerWeights(
        qkv=2.0 * values(attended + 2 * shape.kv_heads * shape.head_width, HIDDEN, seed=seed),
        out=values(HIDDEN, attended, seed=seed),
        gate=values(INNER, HIDDEN, seed=seed),
        up=values(INNER, HIDDEN, seed=seed + 1),
        down=values(HIDDEN, INNER, seed=seed),
        input_norm=1.0 + values(HIDDEN, seed=seed),
        post_norm=1.0 + values(HIDDEN, seed=seed + 1),
    )


def public_layers(shape: WindowShape) -> list[LayerWeights]:
    """What layers of public drafts have besides: biases, norms of heads, and a first layer with wide, plain inputs."""
    first, *others = (
        replace(
            layer,
            query_norm=1.0 + values(shape.head_width, seed=seed),
            key_norm=1.0 + values(shape.head_width, seed=seed + 1),
            qkv_bias=values(len(layer.qkv), seed=seed),
            out_bias=values(HIDDEN, seed=seed + 2),
        )
        for seed, layer in enumerate(weights_of(shape, seed) for seed in range(LAYERS))
    )
    return [replace(first, qkv=2.0 * values(len(first.qkv), 2 * HIDDEN), input_norm=None), *others]


def pieces_of(shape: WindowShape) -> tuple[WindowPiece, ...]:
    """Rows that see parts of their windows, as a tree, a chain and a long text do. They are views of wider tensors."""
    tree = torch.rand((3, 23), generator=torch.Generator().manual_seed(1)) < 0.5
    tree[:, -3:] = torch.eye(3, dtype=torch.bool)
    chain = torch.ones(9, dtype=torch.bool)
    chain[2] = False
    text = torch.ones(142, dtype=torch.bool)
    text[60:130] = False
    found = []
    for count, slot, mask in ((3, 20, tree), (4, 5, chain), (1, 0, None), (2, 140, text)):
        keys, own_values = (
            values(LAYERS, shape.kv_heads, SLOTS, shape.head_width, seed=count + part)[:, :, 1:] for part in (0, 9)
        )
        found.append(WindowPiece(keys, own_values, slot, count, mask))
    return tuple(found)


def expected(
    layers: Sequence[LayerWeights],
    shape: WindowShape,
    dtype: torch.dtype,
    residual: torch.Tensor,
    positions: Sequence[int],
    pieces: Sequence[WindowPiece],
    first_inputs: torch.Tensor | None = None,
) -> torch.Tensor:
    """The residual stream in float64, with the weights as the dtype represents them. It writes keys and values."""

    def stored(weight: torch.Tensor) -> torch.Tensor:
        return stored_as(weight, dtype).dequantized().double()

    def norm(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else rms_norm(x, (len(weight),), weight.double(), shape.epsilon)

    def added(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x if bias is None else x + bias.double()

    def rotated(x: torch.Tensor) -> torch.Tensor:
        half = shape.head_width // 2
        angles = torch.tensor(positions).double()[:, None, None] * shape.rotary_steps.double()
        cos, sin = shape.rotary_factor * angles.cos(), shape.rotary_factor * angles.sin()
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    x, group = residual.double(), shape.heads // shape.kv_heads
    for number, layer in enumerate(layers):
        inputs = x if number or first_inputs is None else first_inputs.double()
        joined = added(linear(norm(inputs, layer.input_norm), stored(layer.qkv)), layer.qkv_bias)
        joined = joined.view(len(x), -1, shape.head_width)
        queries, keys = joined[:, : shape.heads], joined[:, shape.heads : -shape.kv_heads]
        queries, keys = rotated(norm(queries, layer.query_norm)), rotated(norm(keys, layer.key_norm))
        attended, first = [], 0
        for piece in pieces:
            part = slice(first, first + piece.count)
            piece.keys[number, :, piece.slot : piece.end] = keys[part].transpose(0, 1).float()
            piece.values[number, :, piece.slot : piece.end] = joined[part, -shape.kv_heads :].transpose(0, 1).float()
            own_keys, own_values = (
                held[number, :, : piece.end].double().repeat_interleave(group, dim=0)
                for held in (piece.keys, piece.values)
            )
            scores = torch.einsum("thd,hsd->hts", queries[part], own_keys) * shape.head_width**-0.5
            if piece.is_seen is not None:
                scores = scores.masked_fill(~piece.is_seen, -torch.inf)
            attended.append(torch.einsum("hts,hsd->thd", scores.softmax(-1), own_values).flatten(1))
            first += piece.count
        x = x + added(linear(torch.cat(attended), stored(layer.out)), layer.out_bias)
        inner = norm(x, layer.post_norm)
        x = x + linear(silu(linear(inner, stored(layer.gate))) * linear(inner, stored(layer.up)), stored(layer.down))
    return x.float()


@CPU_CODE
@pytest.mark.parametrize("width", [(), NARROW], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_public", [False, True], ids=["own", "public"])
def test_layers_attend_to_the_slots_that_are_seen_and_store_keys_and_values(
    dtype: torch.dtype, width: tuple[str, ...], is_public: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if width:
        monkeypatch.setattr(build, "_FLAGS", portable(*width))
    for shape in SHAPES:
        layers = public_layers(shape) if is_public else [weights_of(shape, seed) for seed in range(LAYERS)]
        packed = pack_window_layers(layers, shape, dtype, str(tmp_path))
        assert packed is not None
        mine, theirs = pieces_of(shape), pieces_of(shape)
        positions = [2000, 2000, 2001, 5, 6, 7, 8, 0, 140, 141]
        residual = 5.0 * values(len(positions), HIDDEN)
        first = 5.0 * values(len(positions), 2 * HIDDEN) if is_public else None
        before = residual.clone()
        # Activations are rounded to bfloat16 before products in bfloat16.
        close = {"rtol": 5e-2, "atol": 8e-2} if dtype is torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
        found = packed.run(residual, positions, mine, first)
        torch.testing.assert_close(found, expected(layers, shape, dtype, residual, positions, theirs, first), **close)
        for own, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(own.keys, other.keys, **close)
            torch.testing.assert_close(own.values, other.values, **close)
        assert torch.equal(residual, before)


@CPU_CODE
def test_a_row_gets_the_same_bits_alone_and_beside_others(tmp_path: Path) -> None:
    shape = SHAPES[0]
    packed = pack_window_layers([weights_of(shape)], shape, torch.bfloat16, str(tmp_path))
    assert packed is not None
    residual, positions = values(10, HIDDEN), [5, 5, 6, 5, 6, 7, 8, 0, 140, 141]
    whole = packed.run(residual, positions, pieces_of(shape))
    assert torch.equal(packed.run(residual[3:7], positions[3:7], pieces_of(shape)[1:2]), whole[3:7])
    assert packed.run(residual[:0], [], ()).shape == (0, HIDDEN)


@CPU_CODE
def test_what_a_token_does_not_see_may_be_anything(tmp_path: Path) -> None:
    shape = SHAPES[0]
    packed = pack_window_layers([weights_of(shape)], shape, torch.float32, str(tmp_path))
    assert packed is not None
    piece = pieces_of(shape)[1]
    expected_output = packed.run(values(4, HIDDEN), [5, 6, 7, 8], [piece])
    piece.keys[:, :, 2] = torch.nan
    piece.values[:, :, 2] = torch.inf
    assert torch.equal(packed.run(values(4, HIDDEN), [5, 6, 7, 8], [piece]), expected_output)


@CPU_CODE
def test_other_shapes_and_dtypes_are_refused(tmp_path: Path) -> None:
    shape = SHAPES[0]
    packed = pack_window_layers([weights_of(shape)], shape, torch.float32, str(tmp_path))
    assert packed is not None
    for residual, positions in ((values(3, HIDDEN), [1]), (values(1, 4), [1]), (values(1, HIDDEN).bfloat16(), [1])):
        with pytest.raises(ValueError, match=r"residual: .* is refused; it must be float32"):
            packed.run(residual, positions, pieces_of(shape)[2:3])


@CPU_CODE
def test_inputs_of_the_first_layer_have_the_width_of_its_matrix(tmp_path: Path) -> None:
    shape = SHAPES[0]
    packed = pack_window_layers(public_layers(shape), shape, torch.float32, str(tmp_path))
    assert packed is not None
    for first in (None, values(1, HIDDEN), values(2, 2 * HIDDEN), values(1, 2 * HIDDEN).bfloat16()):
        with pytest.raises(ValueError, match=r"first_inputs: .* is refused; it must be float32 \(1, 112\)"):
            packed.run(values(1, HIDDEN), [1], pieces_of(shape)[2:3], first)


def test_without_a_compiler_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_layers, "load_library", lambda _: None)
    assert pack_window_layers([weights_of(SHAPES[0])], SHAPES[0], torch.float32) is None
