"""Groups of 4 and 8 bits: products within the rounding of float32, and no neighbour changes a bit."""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.engines.kept_kernels import EMULATED_TILES, NARROW, WIDE, portable
from workers.forward.linear import make_linear_kernel
from workers.forward.native import build
from workers.forward.native.build import load_library
from workers.forward.native.packed_linear import PackedProduct, kernel_layout
from workers.forward.weights.base import KernelLayout, Kind, Offset
from workers.forward.weights.groups import GroupStorage

CPU_CODE = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 24, 32, 33, 48, 200)
KINDS = [
    (bits, offset, scale)
    for bits in (4, 8)
    for offset in Offset
    for scale in (torch.float16, torch.bfloat16, torch.float32)
]
SHAPES = (
    *((99, 96, 32, False), (33, 640, 128, True), (40, 576, 16, False), (20, 64, 64, False), (37, 96, 48, False)),
    *((35, 48, 24, True), (34, 24, 8, False)),
)
"""Outputs, inputs, inputs of a group, and whether weights are in activation order."""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of compiled kernels, for all tests of this file."""
    return tmp_path_factory.mktemp("code")


def stored(
    shape: tuple[int, int, int, bool],
    bits: int = 4,
    offset: Offset = Offset.MINIMUM,
    scale: torch.dtype = torch.float16,
) -> GroupStorage:
    """Random groups."""
    outputs, inputs, group, is_shuffled = shape
    draw = torch.Generator().manual_seed(outputs + bits)
    values = torch.randint(0, 16, (outputs, inputs), generator=draw, dtype=torch.uint8)
    packed = values[:, ::2] | values[:, 1::2] << 4 if bits == 4 else values.view(torch.int8) * 17 - 128
    sizes = (outputs, inputs // group)
    scales = (torch.rand(sizes, generator=draw) * 0.02).to(scale)
    offsets = None
    if offset is Offset.ZERO:
        offsets = torch.randint(0, 16, sizes, generator=draw).to(scale)
    elif offset is Offset.MINIMUM:
        offsets = (torch.rand(sizes, generator=draw) * -0.1).to(scale)
    order = torch.randperm(inputs, generator=draw) if is_shuffled else None
    return GroupStorage(packed, scales, bits, offset, offsets, 8.0 if offset is Offset.NONE else 0.0, order)


def floats(shape: tuple[int, int, int, bool], bits: int, scale: torch.dtype) -> GroupStorage:
    """Random groups of 8-bit floats, subnormal ones among them, or of 4 bits that choose from a table."""
    like = stored(shape, bits, Offset.NONE, scale)
    draw = torch.Generator().manual_seed(bits)
    if bits == 4:
        return replace(like, table=torch.randn(16, generator=draw), zero=0.0)
    values = torch.randint(0, 0x7F, (shape[0], shape[1]), generator=draw, dtype=torch.uint8)
    signs = torch.randint(0, 2, values.shape, generator=draw, dtype=torch.uint8) << 7
    return replace(like, values=values | signs, zero=0.0)


def float_layout(library: ctypes.CDLL) -> KernelLayout:
    """Packs groups for sums of floats, as machines without products of integers do."""
    return KernelLayout(kernel_layout(library).columns, lambda _: False, lambda _: False)


def splits_groups(library: ctypes.CDLL) -> bool:
    return kernel_layout(library).multiplies_groups(32)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def bound(storage: GroupStorage, x: torch.Tensor) -> torch.Tensor:
    """Roundings of float32 sums of what is added: values, and zeros or minima, by themselves."""
    scale = storage.scale.double().repeat_interleave(storage.group, 1)
    parts = storage.numbers().double().abs() * scale
    if storage.offsets is None:
        parts += storage.zero * scale
    else:
        own = storage.offsets.double().abs().repeat_interleave(storage.group, 1)
        parts += own if storage.offset is Offset.MINIMUM else own * scale
    ordered = torch.empty_like(parts)
    ordered[:, slice(None) if storage.order is None else storage.order] = parts
    return (storage.inputs + 8) * 2.0**-24 * (x.double().abs() @ ordered.T) + 1e-7


def split_bound(storage: GroupStorage, x: torch.Tensor) -> torch.Tensor:
    """What products of integers add: half a step of each input, 1 / 32512 of the largest one of its group."""
    order = torch.arange(storage.inputs) if storage.order is None else storage.order
    largest = x[:, order].double().abs().view(len(x), -1, storage.group).amax(2).repeat_interleave(storage.group, 1)
    return largest * (0.5001 / 32512) @ storage.dequantized().double()[:, order].abs().T


def check(storage: GroupStorage, packed: PackedProduct, bias: torch.Tensor) -> torch.Tensor:
    """Products of many rows, which are those of each row by itself."""
    x = numbers(210, storage.inputs)
    x[::7] *= torch.logspace(-20, 3, storage.inputs)  # a large input makes no other group coarse
    found = packed.multiply(x)
    expected = x.double() @ storage.dequantized().double().T + bias.double()
    allowed = bound(storage, x) + 1e-6 * expected.abs()
    if packed.matrix.matrix.kind in (Kind.GROUPS4_TILES, Kind.GROUPS8_TILES):
        allowed += split_bound(storage, x)
    assert bool(((found - expected).abs() <= allowed).all())
    for rows in ROWS:
        for first in (0, 7, len(x) - rows):
            part = x[first : first + rows].clone()
            assert torch.equal(packed.multiply(part), found[first : first + rows][: len(part)])
    return found


@CPU_CODE
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("bits", "offset", "scale"), KINDS, ids=str)
def test_products_are_those_of_the_dequantized_weights_at_any_number_of_rows(
    bits: int, offset: Offset, scale: torch.dtype, threads: int, code: Path
) -> None:
    library = load_library(str(code))
    assert library is not None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in SHAPES:
            storage, bias = stored(shape, bits, offset, scale), numbers(shape[0])
            check(storage, PackedProduct(storage, library, bias), bias)
            if threads == 1:
                check(storage, PackedProduct(storage, library, bias, layout=float_layout(library)), bias)
    finally:
        torch.set_num_threads(before)


@CPU_CODE
@pytest.mark.slow
def test_tile_registers_and_vectors_have_the_same_bits(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of integers are exact: neither the number of rows nor tile registers (AMX) change a bit."""
    library = load_library(str(code))
    assert library is not None
    if not splits_groups(library):
        pytest.skip("this processor multiplies no integers")
    # Without bfloat16 there are no tiles; less optimization compiles sooner.
    flags = ["-O1" if flag == "-O3" else flag for flag in build._FLAGS]
    monkeypatch.setattr(build, "_FLAGS", [*flags, "-mno-avx512bf16"])
    vectors = load_library(str(tmp_path))
    assert vectors is not None and not vectors.pilotfish_has_tiles()
    monkeypatch.setattr(build, "_FLAGS", portable(*EMULATED_TILES))
    emulated = load_library(str(tmp_path / "emulated"))
    assert emulated is not None and emulated.pilotfish_has_tiles()
    for bits, offset, scale in KINDS:
        for shape in SHAPES:
            storage, bias, x = stored(shape, bits, offset, scale), numbers(shape[0]), numbers(33, shape[1])
            found = PackedProduct(storage, library, bias).multiply(x)
            assert torch.equal(found, PackedProduct(storage, vectors, bias).multiply(x))
            if scale is torch.float16:
                kernel = PackedProduct(storage, emulated, bias)
                for rows in (8, 24):  # groups of at most 32 inputs and 4 bits are bfloat16 numbers for 24 rows
                    assert torch.equal(found[:rows], kernel.multiply(x[:rows]))


@CPU_CODE
def test_integers_are_chosen_by_the_size_of_groups(code: Path) -> None:
    library = load_library(str(code))
    assert library is not None
    for bits, kind, other in ((4, Kind.GROUPS4_TILES, Kind.GROUPS4), (8, Kind.GROUPS8_TILES, Kind.GROUPS8)):
        for group in (8, 16, 32, 64, 128, 256):
            packed = PackedProduct(stored((9, 256, group, False), bits), library)
            expected = kind if group <= 128 and splits_groups(library) else other
            assert packed.matrix.matrix.kind == expected


@CPU_CODE
@pytest.mark.parametrize("bits", [4, 8])
def test_an_input_that_is_not_finite_spoils_its_own_row_alone(bits: int, code: Path) -> None:
    library = load_library(str(code))
    assert library is not None
    storage = stored(SHAPES[0], bits)
    packed, x = PackedProduct(storage, library), numbers(9, 96)
    expected = packed.multiply(x)
    x[3, 40], x[5, 7], x[6, :32] = float("inf"), float("nan"), 1e-40
    found = packed.multiply(x)
    assert not found[[3, 5]].isfinite().any()
    kept = [0, 1, 2, 4, 7, 8]
    assert torch.equal(found[kept], expected[kept])
    rest = x[6:7].double() @ storage.dequantized().double().T
    allowed = bound(storage, x[6:7]) + split_bound(storage, x[6:7])
    assert bool(((found[6:7] - rest).abs() <= allowed).all())


@CPU_CODE
@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_products_of_floats_are_those_of_the_dequantized_weights(bits: int, scale: torch.dtype, code: Path) -> None:
    library = load_library(str(code))
    assert library is not None
    for shape in SHAPES:
        storage, bias = floats(shape, bits, scale), numbers(shape[0])
        check(storage, PackedProduct(storage, library, bias), bias)


def test_all_bytes_are_the_floats_that_they_name() -> None:
    """A sign, four bits of exponent with a bias of 7, three of mantissa."""
    values = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)[None]
    storage = GroupStorage(values, torch.ones(1, 1), 8)
    for byte, found in zip(values[0].tolist(), storage.dequantized()[0].tolist(), strict=True):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        assert found == (-size if byte & 0x80 else size)


def test_floats_are_joined_and_cut_as_integers_are() -> None:
    for storage in (floats((99, 96, 32, False), bits, torch.float32) for bits in (4, 8)):
        parts = [storage.take_outputs(slice(33 * rank, 33 * rank + 33)) for rank in range(3)]
        joined = parts[0].joined(parts[1:])
        assert torch.equal(joined.dequantized(), storage.dequantized())
        assert joined.nbytes == storage.nbytes
        inputs = [storage.take_inputs(slice(32 * rank, 32 * rank + 32)).dequantized() for rank in range(3)]
        assert torch.equal(torch.cat(inputs, dim=1), storage.dequantized())


@CPU_CODE
@pytest.mark.parametrize("width", [NARROW, WIDE], ids=str)
def test_every_width_computes_the_same(width: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Portable C covers widths that this processor lacks."""
    monkeypatch.setattr(build, "_FLAGS", portable(*width))
    library = load_library(str(tmp_path))
    assert library is not None
    for bits in (4, 8):
        for storage in (stored(SHAPES[0], bits), floats(SHAPES[0], bits, torch.float32)):
            bias = numbers(SHAPES[0][0])
            check(storage, PackedProduct(storage, library, bias), bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_kernels_torch_multiplies_widened_slices(dtype: torch.dtype) -> None:
    storage, bias, x = stored((300, 96, 32, False)), numbers(300).to(dtype), numbers(9, 96).to(dtype)
    kernel = storage.kernel(bias)
    whole = kernel.multiply(x)
    expected = x.double() @ storage.dequantized().to(dtype).double().T + bias.double()
    torch.testing.assert_close(whole.double(), expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2)
    for row in range(9):
        assert torch.equal(kernel.multiply(x[row : row + 1]), whole[row : row + 1])


@CPU_CODE
def test_linear_layers_use_the_kernels_in_every_type(code: Path) -> None:
    storage, x = stored(SHAPES[0]), numbers(2, 5, 96)
    kernel = make_linear_kernel(storage, None, str(code))
    expected = x.double() @ storage.dequantized().double().T
    torch.testing.assert_close(kernel.multiply(x).double(), expected, rtol=1e-4, atol=1e-4)
    found = kernel.multiply(x.bfloat16())
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(
        found.double(), x.bfloat16().double() @ storage.dequantized().double().T, rtol=1e-2, atol=1e-2
    )


def test_a_cut_for_three_ranks_is_the_whole() -> None:
    storage = stored((99, 96, 32, False))
    outputs = [storage.take_outputs(slice(33 * rank, 33 * rank + 33)).dequantized() for rank in range(3)]
    inputs = [storage.take_inputs(slice(32 * rank, 32 * rank + 32)).dequantized() for rank in range(3)]
    assert torch.equal(torch.cat(outputs), storage.dequantized())
    assert torch.equal(torch.cat(inputs, dim=1), storage.dequantized())


def test_a_cut_through_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="inputs 0 to 48 cut groups of 32 inputs into parts"):
        stored((9, 96, 32, False)).take_inputs(slice(0, 48))
    with pytest.raises(ValueError, match="activation order"):
        stored((9, 96, 32, True)).take_inputs(slice(0, 32))


def test_matrices_of_different_storages_are_joined_without_loss() -> None:
    first = stored((9, 96, 32, False))
    for other in (
        stored((5, 96, 32, False)),
        stored((5, 96, 16, False), 8, Offset.NONE, torch.float32),
        stored((5, 96, 96, False), 4, Offset.ZERO),
    ):
        joined = first.joined([other])
        assert torch.equal(joined.dequantized(), torch.cat([first.dequantized(), other.dequantized()]))


def test_outputs_may_be_reordered_and_missing_ones_are_zeros() -> None:
    storage = stored((9, 96, 32, False))
    taken = storage.take_outputs(torch.tensor([8, -1, 0])).dequantized()
    assert torch.equal(taken[[0, 2]], storage.dequantized()[[8, 0]])
    assert not taken[1].any()
