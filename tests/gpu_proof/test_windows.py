"""The attention of drafting modules over windows, interpreted or on a GPU: equal to torch's, and free of neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu_proof.device import DEVICE, needs_kernels
from workers.forward import window_attention
from workers.forward.graph_sizes import DraftingSize
from workers.forward.native.window_layers import WindowPiece
from workers.forward.window_attention import (
    LoopedWindows,
    TiledWindows,
    WindowBuffers,
    WindowHeads,
    WindowRows,
    WindowStep,
    plan_tiles,
    trial_difference,
)
from workers.transfer import to_device_together

pytestmark = needs_kernels()

LAYERS, SPARE = 2, 3
CLOSE = 4e-6 if DEVICE.type == "cpu" else 2e-5
"""Float32. The exponential of a GPU is an approximation."""
SMALL = WindowHeads(4, 2, 16, 16)
SHAPES = [SMALL, WindowHeads(2, 2, 34, 34), WindowHeads(8, 1, 64, 64), WindowHeads(2, 2, 192, 128)]
PIECES = [(20, 3, "tree"), (5, 4, "slots"), (0, 1, ""), (1030, 2, "tree"), (9, 17, "tree")]
"""Slots before a piece, its tokens, and its mask: those with more than 512 slots have several splits."""


def pieces_of(shapes: Sequence[tuple[int, int, str]], heads: WindowHeads) -> list[WindowPiece]:
    """Pieces over windows of random numbers, behind whose end everything is NaN. They are views of wider tensors."""
    found = []
    for index, (slot, count, kind) in enumerate(shapes):
        generator, end = torch.Generator().manual_seed(index), slot + count
        keys, values = (
            torch.randn((LAYERS, heads.kv_heads, end + 2 * SPARE, heads.width), generator=generator) for _ in range(2)
        )
        for held in (keys, values):
            held[:, :, SPARE + end :] = float("nan")
        seen = torch.rand((count, end), generator=generator) < 0.5
        seen[:, slot:] = torch.ones(count, count, dtype=torch.bool).tril()
        own_keys, own_values = (held.to(DEVICE)[:, :, SPARE:] for held in (keys, values))
        mask = {"tree": seen, "slots": seen[-1], "": None}[kind]
        found.append(WindowPiece(own_keys, own_values, slot, count, mask))
    return found


def tiled(pieces: Sequence[WindowPiece], heads: WindowHeads) -> WindowStep:
    from workers.forward.triton import windows

    planned = plan_tiles(pieces, range(sum(piece.count for piece in pieces)), heads)
    positions, tiles = planned.metadata(to_device_together(planned.arrays, DEVICE))
    return TiledWindows(windows, pieces, tiles, positions)


def looped(pieces: Sequence[WindowPiece]) -> WindowStep:
    return LoopedWindows(pieces, torch.empty(0), DEVICE)


def drawn(tokens: int, heads: WindowHeads, seed: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = (heads.heads, heads.width), (heads.kv_heads, heads.width), (heads.kv_heads, heads.value_width)
    queries, keys, values = (torch.randn((tokens, *size), generator=generator).to(DEVICE) for size in sizes)
    return queries, keys, values


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_all_pieces_equal_torch_one_after_another(heads: WindowHeads) -> None:
    mine, theirs = pieces_of(PIECES, heads), pieces_of(PIECES, heads)
    step, reference = tiled(mine, heads), looped(theirs)
    fresh = drawn(sum(piece.count for piece in mine), heads)
    for layer, scaling in ((0, None), (1, 0.1)):
        found, expected = (one.attend(layer, *fresh, scaling) for one in (step, reference))
        torch.testing.assert_close(found, expected, atol=CLOSE, rtol=CLOSE)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one.keys.nan_to_num(7.0), other.keys.nan_to_num(7.0))
        assert torch.equal(one.values.nan_to_num(7.0), other.values.nan_to_num(7.0))


def test_no_neighbour_changes_a_bit() -> None:
    fresh = drawn(sum(count for _, count, _ in PIECES), SMALL)
    together = tiled(pieces_of(PIECES, SMALL), SMALL).attend(0, *fresh)
    first = 0
    for index, (_, count, _) in enumerate(PIECES):
        part = slice(first, first + count)
        queries, keys, values = (one[part] for one in fresh)
        alone = tiled([pieces_of(PIECES, SMALL)[index]], SMALL).attend(0, queries, keys, values)
        assert torch.equal(alone, together[part]), PIECES[index]
        first += count


def test_heads_of_a_joined_product_are_read_where_they_are() -> None:
    pieces = pieces_of(PIECES[:3], SMALL)
    tokens = sum(piece.count for piece in pieces)
    joined = torch.randn((tokens, SMALL.heads + 2 * SMALL.kv_heads, SMALL.width), generator=torch.Generator()).to(
        DEVICE
    )
    queries, keys, values = torch.split(joined, [SMALL.heads, SMALL.kv_heads, SMALL.kv_heads], dim=1)
    found = tiled(pieces, SMALL).attend(1, queries, keys, values)
    other = tiled(pieces, SMALL).attend(1, queries.contiguous(), keys.contiguous(), values.contiguous())
    assert torch.equal(other, found)


@pytest.mark.parametrize("heads", [SMALL, WindowHeads(2, 2, 24, 16)], ids=str)
def test_the_trial_agrees(heads: WindowHeads) -> None:
    from workers.forward.triton import windows

    assert trial_difference(windows, heads, DEVICE) < CLOSE
    assert window_attention.kernels_for(heads, torch.device("cpu")) is None


def test_kernels_are_tried_once_for_the_same_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.forward.triton import windows

    tried: list[WindowHeads] = []

    def trial(_: object, heads: WindowHeads, __: torch.device) -> float:
        tried.append(heads)
        return 0.0

    monkeypatch.setattr(window_attention, "trial_difference", trial)
    first, again, other = WindowHeads(6, 2, 40, 40), WindowHeads(6, 2, 40, 40), WindowHeads(6, 3, 40, 40)
    for heads in (first, again, other):
        assert window_attention.kernels_for(heads, torch.device("cuda")) is windows
    assert tried == [first, other]


def buffers_for(heads: WindowHeads) -> WindowBuffers:
    """Buffers for up to eight pieces of 64 tokens in all."""
    from workers.forward.triton import windows

    attention: Any = SimpleNamespace(kernels=windows, heads=heads, device=DEVICE)
    return WindowBuffers(DraftingSize(8, 64), attention, (LAYERS, 1200, 3))


def rows_of(pieces: Sequence[WindowPiece]) -> WindowRows:
    tokens = sum(piece.count for piece in pieces)
    return WindowRows(pieces, range(tokens), range(tokens), (tokens - 1,))


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@torch.inference_mode()
def test_padding_changes_no_bit(heads: WindowHeads) -> None:
    """The buffers of a graph hold more tokens, pieces and tiles than the pass. What padding computes with is not even
    a number, and a smaller pass follows a larger one in the same buffers."""
    buffers = buffers_for(heads)
    for shapes in (PIECES, PIECES[1:3]):
        mine, theirs = pieces_of(shapes, heads), pieces_of(shapes, heads)
        tokens = sum(piece.count for piece in mine)
        fresh = drawn(tokens, heads)
        padded = [torch.cat([one, one.new_full((64 - tokens, *one.shape[1:]), float("nan"))]) for one in fresh]
        assert buffers.fill(rows_of(mine))
        found = buffers.step.attend(1, padded[0], padded[1], padded[2])
        assert len(found) == 64
        assert torch.equal(found[:tokens], tiled(theirs, heads).attend(1, *fresh))
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one.keys.nan_to_num(7.0), other.keys.nan_to_num(7.0))
            assert torch.equal(one.values.nan_to_num(7.0), other.values.nan_to_num(7.0))
        assert buffers.tokens.tolist() == [*range(tokens), *[0] * (64 - tokens)]
        assert buffers.wanted[:2].tolist() == [tokens - 1, 0]
        assert buffers.step.positions[:tokens].tolist() == list(range(tokens))


@torch.inference_mode()
def test_a_pass_whose_windows_are_too_long_fills_no_buffers() -> None:
    buffers = buffers_for(SMALL)
    before = buffers.tokens.clone()
    assert not buffers.fill(rows_of(pieces_of([(1300, 60, "tree")], SMALL)))
    assert torch.equal(buffers.tokens, before)
    assert buffers.fill(rows_of(pieces_of([(1300, 2, "tree")], SMALL)))  # it is the sum that counts


def test_keys_and_values_of_all_layers_are_stored_together() -> None:
    pieces = pieces_of(PIECES, SMALL)
    tokens = sum(piece.count for piece in pieces)
    generator = torch.Generator().manual_seed(5)
    joined = torch.randn((tokens, LAYERS, 2, SMALL.kv_heads, SMALL.width), generator=generator).to(DEVICE)
    keys, values = (joined[:, :, part].transpose(0, 1) for part in range(2))  # [layers, tokens, KV heads, width]
    from workers.forward.triton import windows

    planned = plan_tiles(pieces, range(tokens), SMALL)
    windows.write_layers(keys, values, planned.metadata(to_device_together(planned.arrays, DEVICE))[1])
    first = 0
    for piece in pieces:
        part = slice(first, first + piece.count)
        assert torch.equal(piece.keys[:, :, piece.slot : piece.end], keys[:, part].transpose(1, 2))
        assert torch.equal(piece.values[:, :, piece.slot : piece.end], values[:, part].transpose(1, 2))
        first += piece.count
