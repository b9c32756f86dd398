"""K-quants, Q5_0 and Q5_1 take the bytes of their file, and multiply to the bits that wider numbers give."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.support.engines.kept_kernels import EMULATED_TILES, NARROW, WIDE, portable
from tests.unit.forward.weights.test_gguf import drawn
from workers.forward.native import build
from workers.forward.native.build import load_library
from workers.forward.native.packed_linear import PackedProduct, float_layout, kernel_layout
from workers.forward.weights.base import CutRefused, KernelLayout, Kind, Offset, Planes, joined_runs, stay_apart
from workers.forward.weights.block_quants import BlockQuantStorage
from workers.forward.weights.gguf import gguf_storage
from workers.forward.weights.groups import GroupStorage
from workers.forward.weights.plain import PlainStorage

CPU_CODE = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
NAMES = ("Q2_K", "Q3_K", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K")
ROWS = (1, 2, 3, 4, 5, 8, 10, 12, 13, 16, 24, 33, 48)
"""Numbers of rows that are multiplied by different code: sums in registers, widened slices, tile registers."""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of compiled kernels, for all tests of this file."""
    return tmp_path_factory.mktemp("code")


def stored(name: str, outputs: int = 37, blocks: int = 3) -> BlockQuantStorage:
    """A random matrix whose last block of outputs is not full. Some scales, minima and units are zeros."""
    found = gguf_storage(name, torch.from_numpy(drawn(name, outputs, blocks if name.endswith("K") else 8 * blocks)))
    assert isinstance(found, BlockQuantStorage)
    assert found.inputs == 256 * blocks
    found.scale[::5, 1] = 0
    if found.scale_unit is not None:
        found.scale_unit[1] = 0.0
    if found.minimum is not None:
        found.minimum[::3, 2] = 0
    return found


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def bits(values: torch.Tensor) -> torch.Tensor:
    """Floats as integers, so that 0 and −0 differ."""
    return values.contiguous().view(torch.int32)


def is_equal_to_the_bit(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits(one), bits(other))


@CPU_CODE
@pytest.mark.parametrize("name", NAMES)
def test_memory_has_at_most_a_twentieth_more_than_the_file(name: str, code: Path) -> None:
    library = load_library(str(code))
    assert library is not None
    raw = drawn(name, 64, 8)
    storage = gguf_storage(name, torch.from_numpy(raw))
    assert raw.nbytes <= storage.nbytes <= 1.05 * raw.nbytes
    for layout in (kernel_layout(library), float_layout(library)):
        assert PackedProduct(storage, library, layout=layout).matrix.weight.nbytes == storage.nbytes


def check_products(
    library: ctypes.CDLL, rows: Sequence[int], layouts: Sequence[KernelLayout], names: Sequence[str] = NAMES
) -> set[Kind]:
    """Check that products have the bits of scales as floats and of whole bytes. Returns the kinds of weights."""
    kinds = set()
    for name in names:
        storage, bias = stored(name), numbers(37)
        for layout in layouts:
            own = PackedProduct(storage, library, bias, layout=layout)
            wide = PackedProduct(storage.grouped(), library, bias, layout=layout)
            assert own.matrix.matrix.kind == wide.matrix.matrix.kind
            assert (own.matrix.matrix.planes != Planes.WHOLE) == (name != "Q4_K")
            kinds.add(Kind(own.matrix.matrix.kind))
            for count in rows:
                x = numbers(count, storage.inputs)
                assert is_equal_to_the_bit(own.multiply(x), wide.multiply(x)), (name, kinds, count)
    return kinds


@CPU_CODE
@pytest.mark.parametrize("threads", [1, 2])
def test_products_have_the_bits_of_wider_numbers(threads: int, code: Path) -> None:
    library = load_library(str(code))
    assert library is not None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert check_products(library, ROWS, [float_layout(library)]) == {Kind.GROUPS4, Kind.GROUPS8}
        kinds = check_products(library, ROWS, [kernel_layout(library)])
    finally:
        torch.set_num_threads(before)
    if kernel_layout(library).multiplies_groups(16):
        assert kinds == {Kind.GROUPS4_TILES, Kind.GROUPS8_TILES}


@CPU_CODE
@pytest.mark.parametrize("width", [NARROW, WIDE], ids=str)
def test_every_width_unpacks_the_same(width: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Portable C covers widths that this processor lacks."""
    monkeypatch.setattr(build, "_FLAGS", portable(*width))
    library = load_library(str(tmp_path))
    assert library is not None
    check_products(library, (1, 4, 13), [float_layout(library)])
    check_rows(library)


@CPU_CODE
@pytest.mark.slow
def test_tile_registers_have_the_bits_of_wider_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_FLAGS", portable(*EMULATED_TILES))
    library = load_library(str(tmp_path))
    assert library is not None and library.pilotfish_has_tiles()
    kinds = check_products(library, (8, 24), [kernel_layout(library)])
    assert kinds == {Kind.GROUPS4_TILES, Kind.GROUPS8_TILES}


def check_rows(library: ctypes.CDLL) -> None:
    for name in NAMES:
        storage = stored(name)
        expected = storage.dequantized()
        for layout in (kernel_layout(library), float_layout(library)):
            rows = PackedProduct(storage, library, layout=layout).rows(torch.tensor([36, 0, 1, 17]))
            assert is_equal_to_the_bit(rows, expected[[36, 0, 1, 17]]), name


@CPU_CODE
def test_single_rows_are_the_dequantized_ones_to_the_bit(code: Path) -> None:
    library = load_library(str(code))
    assert library is not None
    check_rows(library)


@CPU_CODE
@pytest.mark.parametrize("name", NAMES)
def test_ranks_cut_between_groups_and_the_parts_multiply_to_the_same_bits(name: str, code: Path) -> None:
    """A rank whose inputs end within a super-block has smaller super-blocks, whose units are those of the whole."""
    library = load_library(str(code))
    assert library is not None
    storage = stored(name, 36, 3)
    outputs = [storage.take_outputs(slice(12 * rank, 12 * rank + 12)) for rank in range(3)]
    assert torch.equal(torch.cat([one.dequantized() for one in outputs]), storage.dequantized())
    for bounds, sizes in (((0, 256, 768), (256, 256)), ((0, 384, 768), (128, 128)), ((0, 160, 768), (32, 32))):
        parts = [storage.take_inputs(slice(*span)) for span in pairwise(bounds)]
        assert tuple(part.super_block for part in parts) == (sizes if name.endswith("K") else (32, 32))
        assert torch.equal(torch.cat([part.dequantized() for part in parts], dim=1), storage.dequantized())
        for part in parts:
            x = numbers(5, part.inputs)
            found = PackedProduct(part, library).multiply(x)
            assert is_equal_to_the_bit(found, PackedProduct(part.grouped(), library).multiply(x))
    assert storage.take_inputs(slice(256, 768)).nbytes * 3 == storage.nbytes * 2
    with pytest.raises(CutRefused, match="inputs 0 to 200 cut groups of"):
        storage.take_inputs(slice(0, 200))


def test_outputs_may_be_reordered_and_missing_ones_are_zeros() -> None:
    for name in NAMES:
        storage = stored(name)
        taken = storage.take_outputs(torch.tensor([8, -1, 0])).dequantized()
        assert torch.equal(taken[[0, 2]], storage.dequantized()[[8, 0]])
        assert not taken[1].any()


@pytest.mark.parametrize("name", NAMES)
def test_matrices_of_one_type_are_joined_as_they_are(name: str) -> None:
    first, other = stored(name), stored(name, 12)
    assert not stay_apart([first, other])
    joined = first.joined([other])
    assert isinstance(joined, BlockQuantStorage)
    assert joined.nbytes == first.nbytes + other.nbytes
    assert torch.equal(joined.dequantized(), torch.cat([first.dequantized(), other.dequantized()]))


def test_matrices_of_different_types_stay_apart_at_their_own_bits() -> None:
    query, key, value = stored("Q4_K", 12), stored("Q4_K", 8), stored("Q6_K", 8)
    runs = joined_runs([query, key, value])
    assert [run.outputs for run in runs] == [20, 8]
    assert sum(run.nbytes for run in runs) == query.nbytes + key.nbytes + value.nbytes
    assert [run.outputs for run in joined_runs([query, value, key])] == [12, 8, 8]
    eights = gguf_storage("Q8_0", torch.from_numpy(drawn("Q8_0", 6, 24)))
    for joined in (value.joined([query, eights]), eights.joined([value, query])):
        assert isinstance(joined, GroupStorage)
        assert joined.nbytes > value.nbytes + query.nbytes + eights.nbytes
    plain = PlainStorage(key.dequantized().bfloat16())
    assert [run.outputs for run in joined_runs([query, plain, plain])] == [12, 16]
    scales = numbers(6, 96)
    wide = GroupStorage(eights.values, scales, 8, Offset.MINIMUM, scales)
    assert wide.nbytes == 2 * 6 * 768  # as plain numbers they would take no more bytes, and be rounded
    assert stay_apart([PlainStorage(numbers(6, 768).bfloat16()), wide])
    parts = [value.dequantized(), query.dequantized(), eights.dequantized()]
    assert torch.equal(value.joined([query, eights]).dequantized(), torch.cat(parts))


@pytest.mark.parametrize(
    ("name", "bits_on_a_gpu"), [("Q2_K", 5.125), ("Q3_K", 4.5625), ("Q4_K", 4.625), ("Q5_K", 8.625), ("Q6_K", 8.5625)]
)
def test_a_gpu_has_4_or_8_bits_and_the_scales_of_the_file(name: str, bits_on_a_gpu: float) -> None:
    raw = drawn(name, 64, 2)
    storage = gguf_storage(name, torch.from_numpy(raw))
    assert isinstance(storage, BlockQuantStorage)
    matrix = storage.words()
    assert matrix.nbytes - matrix.counters.nbytes == bits_on_a_gpu * 64 * 512 // 8


def test_without_kernels_torch_multiplies_widened_slices() -> None:
    storage, bias, x = stored("Q5_K", 300, 1), numbers(300), numbers(9, 256)
    whole = storage.kernel(bias).multiply(x)
    assert torch.equal(whole, storage.grouped().kernel(bias).multiply(x))
