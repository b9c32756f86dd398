"""Products with packed weights, on a GPU or interpreted: those of the de-quantized weights, and free of neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.gpu_proof.device import DEVICE, needs_kernels
from tests.support.models import quantized
from tests.support.models.stored_gguf import random_k_quant
from workers.forward.gpu_product import check_product, gpu_product
from workers.forward.weights.base import NoGpuProduct, Offset
from workers.forward.weights.block_quants import BlockQuantStorage
from workers.forward.weights.floats import e4m3_storage, mxfp4_storage
from workers.forward.weights.gguf import gguf_storage
from workers.forward.weights.groups import GroupStorage, pairs
from workers.forward.weights.int8 import Int8Storage
from workers.forward.weights.words import BLOCK, launch_shape, pack_words, splits_of

pytestmark = needs_kernels()

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
FORMATS = {
    "AWQ": (4, 128, Offset.ZERO, HALF, BRAIN),
    "AWQ of float16": (4, 128, Offset.ZERO, HALF, HALF),
    "GPTQ": (4, 64, Offset.NONE, HALF, BRAIN),
    "W4A16 of channels": (4, 0, Offset.NONE, BRAIN, BRAIN),
    "Q4_0": (4, 32, Offset.NONE, HALF, BRAIN),
    "groups of 16": (4, 16, Offset.ZERO, HALF, BRAIN),
    "Q4_1": (4, 32, Offset.MINIMUM, HALF, HALF),
    "Q2_K": (4, 16, Offset.MINIMUM, FLOAT, BRAIN),
    "Q3_K": (4, 16, Offset.NONE, FLOAT, BRAIN),
    "Q4_K": (4, 32, Offset.MINIMUM, FLOAT, BRAIN),
    "Q6_K": (8, 16, Offset.NONE, FLOAT, BRAIN),
    "Q8_0": (8, 32, Offset.NONE, HALF, BRAIN),
    "W8A16": (8, 128, Offset.ZERO, HALF, HALF),
    "float32": (4, 32, Offset.ZERO, HALF, FLOAT),
}
"""Bits, inputs of a group or 0 for one group, what a group has beside its scale, type of scales, type of inputs."""


def drawn(shape: tuple[int, int], name: str, seed: int = 0) -> GroupStorage:
    """Random groups of a format."""
    bits, group, offset, scale, _ = FORMATS[name]
    outputs, inputs = shape
    draw = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 1 << bits, (outputs, inputs), generator=draw, dtype=torch.uint8)
    size = (outputs, inputs // (group or inputs))
    scales = (torch.rand(size, generator=draw) * 0.02 + 0.001).to(scale)
    offsets = None
    if offset is Offset.ZERO:
        offsets = torch.randint(0, 16, size, generator=draw).to(scale)
    elif offset is Offset.MINIMUM:
        offsets = (torch.rand(size, generator=draw) * -0.1).to(scale)
    zero = 0.0 if offset is not Offset.NONE or bits == 8 else 4.0 if name == "Q3_K" else 8.0
    held = pairs(values) if bits == 4 else values.view(torch.int8)
    return GroupStorage(held, scales, bits, offset, offsets, zero).to(DEVICE)


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)


def check(storage: GroupStorage | Int8Storage | BlockQuantStorage, dtype: torch.dtype) -> None:
    bias = numbers(storage.outputs, dtype=dtype)
    product = gpu_product(storage, bias, dtype)
    x = numbers(3, 7, storage.inputs, dtype=dtype)
    expected = x.float() @ storage.dequantized().T + bias.float()
    bound = 4 * torch.finfo(dtype).eps + 2.0**-16  # of the largest number: the interpreter cuts off bits of bfloat16
    error = (product.multiply(x).float() - expected).abs().max() / expected.abs().max()
    assert float(error) <= bound


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_is_that_of_the_dequantized_weights(name: str) -> None:
    check(drawn((70, 384 if FORMATS[name][1] else 96), name), FORMATS[name][4])


@pytest.mark.parametrize("dtype", [BRAIN, HALF])
def test_floats_of_eight_and_four_bits(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    wide = torch.randn(66, 256, generator=draw).mul(0.05).to(torch.float8_e4m3fn)  # many are subnormal
    blocks = torch.rand(66, 2, generator=draw) + 0.5
    check(e4m3_storage(wide, blocks, torch.arange(256) // 128).to(DEVICE), dtype)
    check(e4m3_storage(wide, blocks[:, :1], torch.zeros(256, dtype=torch.int64)).to(DEVICE), dtype)
    bits = torch.randint(0, 256, (66, 4, 16), generator=draw, dtype=torch.uint8)
    exponents = torch.randint(118, 128, (66, 4), generator=draw, dtype=torch.uint8)
    check(mxfp4_storage(bits, exponents).to(DEVICE), dtype)


@pytest.mark.parametrize("dtype", [BRAIN, HALF, FLOAT])
@pytest.mark.parametrize("shape", [(70, 512), (64, 192)])
def test_numbers_of_a_table_are_rounded_to_the_type_of_the_inputs(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """NF4: a step has whole groups, or the last one is padded. No count of rows changes a bit."""
    table = quantized.nf4(64)(numbers(64, 64, dtype=FLOAT).cpu())[0]["weight.quant_map"].to(DEVICE)
    storage = replace(drawn(shape, "GPTQ"), table=table, zero=0.0)
    check(storage, dtype)
    rounded = replace(storage, table=table.to(dtype).float())
    product = gpu_product(storage, None, dtype)
    check_product(product, rounded.dequantized(), dtype)
    x = numbers(5, shape[1], dtype=dtype)
    assert torch.equal(product.multiply(x), gpu_product(rounded, None, dtype).multiply(x))


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_k_quants_have_the_bits_of_float32_scales(name: str) -> None:
    storage = gguf_storage(name, torch.from_numpy(random_k_quant(name, numbers(70, 512, dtype=FLOAT).cpu() * 0.02)))
    assert isinstance(storage, BlockQuantStorage)
    for own in (storage, storage.take_inputs(slice(0, 384))):
        own = own.to(DEVICE)
        check(own, BRAIN)
        x = numbers(5, own.inputs, dtype=BRAIN)
        product, wide = gpu_product(own, None, BRAIN), gpu_product(own.grouped(), None, BRAIN)
        assert product.matrix.scale.dtype is torch.int8
        assert torch.equal(product.multiply(x), wide.multiply(x))


def test_int8_with_one_scale_for_each_output() -> None:
    check(Int8Storage.quantized(numbers(66, 96, dtype=BRAIN)), BRAIN)


def test_activation_order() -> None:
    order = torch.randperm(128, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    check(replace(drawn((66, 128), "GPTQ"), order=order), BRAIN)


def test_many_inputs_are_divided_into_splits_and_no_count_of_rows_changes_a_bit() -> None:
    storage = drawn((64, 512), "groups of 16")
    product = gpu_product(storage, None, BRAIN)
    assert product.matrix.splits == 2
    check_product(product, storage.dequantized(), BRAIN)
    assert not product.matrix.counters.any()


def test_neighbours_change_no_bit_whatever_they_hold() -> None:
    product = gpu_product(drawn((70, 512), "AWQ"), None, BRAIN)
    x = numbers(20, 512, dtype=BRAIN)
    whole = product.multiply(x)
    x[:7], x[8:] = 1e30, -1e30
    assert torch.equal(product.multiply(x)[7], whole[7])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="only the interpreter shows addresses")
def test_no_tile_reads_beyond_the_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """For many rows a tile has as many outputs as two blocks of words, of which the last one may not exist."""
    from triton.runtime.interpreter import InterpreterBuilder

    product, loads = gpu_product(drawn((64, 128), "AWQ"), None, BRAIN), list[tuple[int, int]]()
    words, load = product.matrix.words, InterpreterBuilder.create_masked_load

    def noted(builder: Any, places: Any, mask: Any, *others: Any) -> Any:
        read = places.data[mask.data]
        if places.get_element_ty().primitive_bitwidth == 32 and read.size:
            loads.append((int(read.min()), int(read.max())))
        return load(builder, places, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noted)
    for count in (1, 17, 65):
        loads.clear()
        product.multiply(numbers(count, 128, dtype=BRAIN))
        first = words.data_ptr()
        of_words = [last for begin, last in loads if first <= begin < first + words.nbytes]
        assert of_words and max(of_words) < first + words.nbytes


def test_a_wrong_product_fails_its_trial() -> None:
    storage, other = drawn((64, 128), "AWQ"), drawn((64, 128), "AWQ", seed=1)
    with pytest.raises(NoGpuProduct, match="differs from the reference"):
        check_product(gpu_product(other, None, BRAIN), storage.dequantized(), BRAIN)


def test_a_rank_holds_its_part_of_the_words() -> None:
    whole = drawn((128, 512), "AWQ")
    parts = [whole.take_outputs(slice(0, 64)), whole.take_outputs(slice(64, 128))]
    x = numbers(2, 512, dtype=BRAIN)
    joined = torch.cat([gpu_product(part, None, BRAIN).multiply(x) for part in parts], dim=1)
    assert torch.equal(joined, gpu_product(whole, None, BRAIN).multiply(x))
    check(whole.take_inputs(slice(256, 512)), BRAIN)


def test_words_hold_as_many_bytes_as_the_storage() -> None:
    for name, (_, _, offset, _, dtype) in FORMATS.items():
        storage = drawn((128, 512), name)
        product = gpu_product(storage, None, dtype)
        assert product.matrix.nbytes - product.matrix.counters.nbytes == storage.nbytes, name
        assert (product.matrix.offset is None) is (offset is Offset.NONE)


def test_the_order_of_values_in_words() -> None:
    values = torch.arange(BLOCK * 256).view(BLOCK, 256).remainder(16).to(torch.uint8)
    word = int(pack_words(values, 4, 32)[0, 0, 1, 5])
    held = [word >> 4 * place & 15 for place in (0, 4, 1, 5, 2, 6, 3, 7)]
    assert held == values[1, 5::32].tolist()


def test_a_storage_without_a_product_is_refused_by_name() -> None:
    table = torch.linspace(-1, 1, 16).to(DEVICE)
    with pytest.raises(NoGpuProduct, match="a table, with a zero or a minimum"):
        gpu_product(replace(drawn((64, 64), "GPTQ"), table=table, zero=8.0), None, BRAIN)
    with pytest.raises(NoGpuProduct, match="groups of 24 inputs"):
        gpu_product(replace(drawn((64, 96), "Q4_0"), scale=torch.ones(64, 4, device=DEVICE)), None, BRAIN)


def test_splits_and_tiles_depend_on_the_matrix_and_the_rows_alone() -> None:
    assert [splits_of(outputs, 16) for outputs in (4096, 6144, 28672, 128256)] == [4, 4, 1, 1]
    assert splits_of(4096, 56) == 4
    assert {launch_shape(rows).rows for rows in (1, 16)} == {16}
    assert not launch_shape(2048).splits_apart
