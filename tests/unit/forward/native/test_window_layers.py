"""The layers of a drafting module in one call of the kernels compute what torch computes with the same weights."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
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
SHAPES = (WindowShape(4, 2, 16, 1e-5, 10000.0), WindowShape(3, 1, 34, 1e-5, 500.0), WindowShape(6, 2, 64, 1e-5, 1e5))
"""Not all heads fill vectors."""
LAYERS, HIDDEN, INNER, SLOTS = 2, 56, 72, 40


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


def pieces_of(shape: WindowShape) -> tuple[WindowPiece, ...]:
    """Two rows: a tree with its mask, and a chain that sees every slot but one. They are views of wider tensors."""
    tree = torch.rand((3, 23), generator=torch.Generator().manual_seed(1)) < 0.5
    tree[:, -3:] = torch.eye(3, dtype=torch.bool)
    chain = torch.ones(9, dtype=torch.bool)
    chain[2] = False
    found = []
    for count, slot, mask in ((3, 20, tree), (4, 5, chain), (1, 0, None)):
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
) -> torch.Tensor:
    """The residual stream in float64, with the weights as the dtype represents them. It writes keys and values."""

    def stored(weight: torch.Tensor) -> torch.Tensor:
        return stored_as(weight, dtype).dequantized().double()

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (HIDDEN,), weight.double(), shape.epsilon)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        half = shape.head_width // 2
        angles = torch.tensor(positions).double()[:, None, None] * shape.rope_theta ** (
            -torch.arange(half, dtype=torch.float64) / half
        )
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)

    x, group = residual.double(), shape.heads // shape.kv_heads
    for number, layer in enumerate(layers):
        joined = linear(norm(x, layer.input_norm), stored(layer.qkv)).view(len(x), -1, shape.head_width)
        queries, keys = rotated(joined[:, : shape.heads]), rotated(joined[:, shape.heads : -shape.kv_heads])
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
        x = x + linear(torch.cat(attended), stored(layer.out))
        inner = norm(x, layer.post_norm)
        x = x + linear(silu(linear(inner, stored(layer.gate))) * linear(inner, stored(layer.up)), stored(layer.down))
    return x.float()


@CPU_CODE
@pytest.mark.parametrize("width", [(), NARROW], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_attend_to_the_slots_that_are_seen_and_store_keys_and_values(
    dtype: torch.dtype, width: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if width:
        monkeypatch.setattr(build, "_FLAGS", portable(*width))
    for shape in SHAPES:
        layers = [weights_of(shape, seed) for seed in range(LAYERS)]
        packed = pack_window_layers(layers, shape, dtype, str(tmp_path))
        assert packed is not None
        mine, theirs = pieces_of(shape), pieces_of(shape)
        positions = [2000, 2000, 2001, 5, 6, 7, 8, 0]
        residual = 5.0 * values(len(positions), HIDDEN)
        before = residual.clone()
        # Activations are rounded to bfloat16 before products in bfloat16.
        close = {"rtol": 5e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {"rtol": 1e-3, "atol": 1e-3}
        found = packed.run(residual, positions, mine)
        torch.testing.assert_close(found, expected(layers, shape, dtype, residual, positions, theirs), **close)
        for own, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(own.keys, other.keys, **close)
            torch.testing.assert_close(own.values, other.values, **close)
        assert torch.equal(residual, before)


@CPU_CODE
def test_a_row_gets_the_same_bits_alone_and_beside_others(tmp_path: Path) -> None:
    shape = SHAPES[0]
    packed = pack_window_layers([weights_of(shape)], shape, torch.bfloat16, str(tmp_path))
    assert packed is not None
    residual, positions = values(8, HIDDEN), [5, 5, 6, 5, 6, 7, 8, 0]
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
            packed.run(residual, positions, pieces_of(shape)[2:])


def test_without_a_compiler_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_layers, "load_library", lambda _: None)
    assert pack_window_layers([weights_of(SHAPES[0])], SHAPES[0], torch.float32) is None
