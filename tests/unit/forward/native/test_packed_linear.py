"""Packed weights multiply as torch does, with the same bits for a row whatever the other rows are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.support.engines.kept_kernels import EMULATED_TILES, NARROW, WIDE, portable
from workers.forward.native import build, packed_linear
from workers.forward.native.packed_linear import InputNorm, PackedLinear, PackedProduct, has_int8_tiles
from workers.forward.weights.choice import INT4, stored_as
from workers.forward.weights.plain import PlainStorage

DTYPES = (torch.float32, torch.bfloat16, torch.int8, INT4)
SHAPES = ((64, 48), (1, 2), (99, 84), (33, 250))
"""[out, in]. Not all fill the blocks of packed weights."""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of compiled kernels, for all tests of this file."""
    return tmp_path_factory.mktemp("code")


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def expected(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """The product with the weights as the dtype represents them."""
    stored = stored_as(weight, dtype).dequantized()
    return torch.nn.functional.linear(x.double(), stored.double(), None if bias is None else bias.double()).float()


def check(dtype: torch.dtype, code: Path) -> None:
    for outputs, inputs in SHAPES:
        weight, bias = values(outputs, inputs), values(outputs)
        for given in (None, bias):
            packed = PackedLinear(weight, dtype, given, str(code))
            for rows in (0, 1, 2, 7, 9, 20):
                # Exact in bfloat16, so that rounding the rows changes nothing.
                x = values(rows, inputs).bfloat16().float()
                wanted = expected(weight, given, dtype, x)
                # torch returns a product of bfloat16 numbers rounded to bfloat16. Beside 4 bits, rows are integers.
                tolerance = {torch.bfloat16: 2e-2, INT4: 5e-4}.get(dtype, 1e-4)
                torch.testing.assert_close(packed.multiply(x), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("width", [(), NARROW, WIDE], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_weights_multiply_as_torch_does(
    dtype: torch.dtype, width: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Portable C covers widths that this processor lacks."""
    if width:
        monkeypatch.setattr(build, "_FLAGS", portable(*width))
    check(dtype, tmp_path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_compiler_torch_multiplies(dtype: torch.dtype, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "load_library", lambda _: None)
    check(dtype, code)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_kernels", [True, False])
def test_inputs_are_normalised_group_by_group(
    dtype: torch.dtype, has_kernels: bool, code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr(packed_linear, "load_library", lambda _: None)
    weight, norm, x = values(40, 96), InputNorm(values(64), 1e-5, 32, plain=32), 3.0 * values(7, 96)
    groups = torch.nn.functional.rms_norm(x[:, 32:].view(7, 2, 32), (32,), None, 1e-5).flatten(1) * norm.weight
    wanted = torch.cat([x[:, :32], groups], dim=1) @ weight.T
    found = PackedLinear(weight, dtype, None, str(code), norm).multiply(x)
    error = (found - wanted).norm() / wanted.norm()
    assert error < {torch.float32: 1e-5, INT4: 0.1}.get(dtype, 1e-2)  # the weights are rounded, too


def check_rows(packed: PackedLinear, x: torch.Tensor) -> None:
    """Rows beside the edges of tiles and chunks, and all narrow products, have the bits of the whole product."""
    together = packed.multiply(x)
    half = len(x) // 2
    for row in (*range(20), 23, 24, 31, 32, 35, 36, half - 1, half, half + 1, len(x) - 1):
        assert torch.equal(packed.multiply(x[row : row + 1])[0], together[row])
    for rows in (*range(1, 40), 63, 64, 65, half):
        assert torch.equal(packed.multiply(x[:rows]), together[:rows])


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_bit_of_a_row_depends_on_the_other_rows(dtype: torch.dtype, code: Path) -> None:
    for inputs in (84, 128, 640):  # the latter two fill tile registers, the last in several slabs
        packed = PackedLinear(values(99, inputs), dtype, directory=str(code))
        check_rows(packed, values(1700, inputs))  # several chunks of rows
        check_rows(packed, values(521, inputs))  # the last of few rows


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_tile_registers_multiply_as_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated registers show that the code for AMX addresses the right numbers, also where rows fill no register."""
    monkeypatch.setattr(build, "_FLAGS", portable(*EMULATED_TILES))
    library = build.load_library(str(tmp_path))
    assert library is not None
    assert library.pilotfish_use_tiles() == 1
    for outputs, inputs in ((33, 640), (99, 32), (40, 84)):  # several slabs, one step, inputs that fill no register
        weight, bias = values(outputs, inputs), values(outputs)
        # Rows are split into two int8 numbers.
        for dtype, tolerance in ((torch.bfloat16, 1e-4), (torch.int8, 2e-3), (INT4, 2e-3)):
            packed = PackedLinear(weight, dtype, bias, str(tmp_path))
            x = values(70, inputs).bfloat16().float()
            for rows in (1, 16, 17, 31, 32, 33, 70):
                wanted = expected(weight, bias, dtype, x[:rows])
                torch.testing.assert_close(packed.multiply(x[:rows]), wanted, rtol=tolerance, atol=tolerance)
            check_rows(packed, values(70, inputs))
        zeros = torch.zeros(3, inputs)
        assert torch.equal(PackedLinear(weight, torch.int8, bias, str(tmp_path)).multiply(zeros), bias.expand(3, -1))


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_integer_products_have_the_bits_of_emulated_tile_registers(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of integers are exact, with VNNI and on tile registers. These inputs are split without rounding."""
    if not has_int8_tiles(str(code)):
        pytest.skip("this processor does not multiply integers")
    inputs = torch.randint(-127 * 256, 127 * 256, (19, 640), generator=torch.Generator().manual_seed(0)) / 256.0
    inputs[:, 0] = 127.0  # a coarse step is 1
    weight = values(99, 640)
    weight[0], weight[1] = 1.0, -1.0  # the largest numbers of both signs
    inputs[3] = 127.0
    found = PackedLinear(weight, torch.int8, directory=str(code)).multiply(inputs)
    monkeypatch.setattr(build, "_FLAGS", portable(*EMULATED_TILES))
    emulated = PackedLinear(weight, torch.int8, directory=str(tmp_path))
    for rows in range(1, len(inputs) + 1):
        assert torch.equal(emulated.multiply(inputs[:rows]), found[:rows])


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("emulated", [False, True])
def test_an_input_that_is_no_number_leaves_no_number_in_its_row_only(
    emulated: bool, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a broken model's tokens would look like decisions. 64 inputs fit tile registers."""
    if emulated:
        monkeypatch.setattr(build, "_FLAGS", portable(*EMULATED_TILES))
    packed = PackedLinear(values(33, 64), torch.int8, None, str(tmp_path if emulated else code))
    x = values(3, 64)
    whole = packed.multiply(x)
    for broken in (torch.nan, torch.inf, -torch.inf):
        x[1, 5] = broken
        found = packed.multiply(x)
        assert not found[1].isfinite().any()
        assert torch.equal(found[[0, 2]], whole[[0, 2]])


def test_an_odd_number_of_inputs_is_multiplied(code: Path) -> None:
    weight, x = values(5, 7), values(3, 7).bfloat16().float()
    for dtype in DTYPES:
        torch.testing.assert_close(
            PackedLinear(weight, dtype, directory=str(code)).multiply(x),
            expected(weight, None, dtype, x),
            rtol=1e-2,
            atol=2e-2,
        )


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("outputs", "inputs"), [(99, 84), (64, 96), (5, 2)])
def test_rows_in_bfloat16_have_the_rounded_product_of_the_same_numbers(outputs: int, inputs: int, code: Path) -> None:
    library = build.load_library(str(code))
    if library is None or not library.pilotfish_has_bfloat16_products():
        pytest.skip("the processor multiplies no bfloat16 numbers")
    packed = PackedProduct(PlainStorage(values(outputs, inputs).bfloat16()), library, values(outputs))
    for rows in (0, 1, 3, 40):
        x = values(rows, inputs).bfloat16()
        assert torch.equal(packed.multiply_bfloat16(x), packed.multiply(x.float()).bfloat16())
    for refused in (values(2, inputs), values(2, inputs + 1).bfloat16(), values(inputs).bfloat16()):
        with pytest.raises(ValueError, match="it must be bfloat16"):
            packed.multiply_bfloat16(refused)


def test_other_dtypes_and_shapes_are_refused(code: Path) -> None:
    with pytest.raises(ValueError, match=r"torch\.float16 on cpu are refused"):
        PackedLinear(values(4, 4), torch.float16)
    packed = PackedLinear(values(4, 6), directory=str(code))
    for x in (values(2, 4), values(6), values(2, 6).bfloat16()):
        with pytest.raises(ValueError, match=r"it must be float32 \[rows, 6\]"):
            packed.multiply(x)
