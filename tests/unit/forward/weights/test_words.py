"""Single rows of a matrix that is packed for GPUs have the bits of the matrix as it is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from tests.support.engines.fake_device import fake_device
from tests.unit.forward.weights.test_gguf import SCALES, drawn
from tests.unit.forward.weights.test_groups import stored
from workers.forward.weights.base import Offset, Storage
from workers.forward.weights.floats import e4m3_storage, mxfp4_storage
from workers.forward.weights.gathered import gathered_groups
from workers.forward.weights.gguf import gguf_storage
from workers.forward.weights.groups import GroupStorage
from workers.forward.weights.int8 import Int8Storage
from workers.forward.weights.plain import PlainStorage

OUT, BLOCKS = 70, 3
"""Outputs that fill no block of words, and blocks of inputs that fill no step."""


def quantized(name: str) -> Storage:
    """A random matrix in a type of GGUF files."""
    return gguf_storage(name, torch.from_numpy(drawn(name, OUT, BLOCKS)))


def groups(bits: int, offset: Offset, *, shuffled: bool = False) -> Storage:
    """A random matrix in groups of 32 inputs."""
    return stored((OUT, 96, 32, shuffled), bits, offset)


def with_zero(bits: int, zero: float) -> GroupStorage:
    """Groups with one zero."""
    found = stored((OUT, 96, 32, False), bits, Offset.NONE)
    assert isinstance(found, GroupStorage)
    return replace(found, zero=zero)


def fp8() -> Storage:
    """All 8-bit floats that are numbers, in groups of 32."""
    values = torch.arange(OUT * 96).remainder(254).to(torch.uint8)
    values = torch.where(values < 127, values, values + 1).view(OUT, 96)
    return e4m3_storage(values.view(torch.float8_e4m3fn), torch.rand(OUT, 3), torch.arange(96) // 32)


def mxfp4() -> Storage:
    """All pairs of 4-bit floats."""
    blocks = torch.arange(OUT * 3 * 16).remainder(256).to(torch.uint8).view(OUT, 3, 16)
    return mxfp4_storage(blocks, torch.arange(OUT * 3).view(OUT, 3).remainder(16).to(torch.uint8) + 120)


def nf4() -> Storage:
    """Values that choose from a table, in groups of 32."""
    return replace(with_zero(4, 0.0), table=torch.linspace(-1, 1, 16))


STORAGES: dict[str, Callable[[], Storage]] = {
    **{name: lambda name=name: quantized(name) for name in SCALES},  # type: ignore[misc]
    **{
        f"{bits} bits, {offset.name}": lambda bits=bits, offset=offset: groups(bits, offset)  # type: ignore[misc]
        for bits in (4, 8)
        for offset in Offset
    },
    "activation order": lambda: groups(4, Offset.ZERO, shuffled=True),
    "4 bits, one zero": lambda: with_zero(4, 8.0),
    "8 bits, one zero": lambda: with_zero(8, -3.0),
    "int8": lambda: Int8Storage.quantized(torch.randn(OUT, 96)),
    "fp8": fp8,
    "mxfp4": mxfp4,
    "nf4": nf4,
}


@pytest.mark.parametrize("name", STORAGES)
def test_rows_have_the_bits_of_the_stored_matrix(name: str) -> None:
    storage, ids = STORAGES[name](), torch.tensor([69, 0, 64, 0, 63])
    found = storage.words().rows(ids)
    assert found.dtype is torch.float32
    assert torch.equal(found.view(torch.int32), storage.dequantized()[ids].view(torch.int32))


def tensors_of(value: Any) -> int:
    """Bytes of all tensors of a storage or of words."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(tensors_of(getattr(value, field.name)) for field in fields(value)) if is_dataclass(value) else 0


def gathered() -> Storage:
    """Groups in activation order, of 20, 5 and 7 inputs."""
    draw = torch.Generator().manual_seed(0)
    group_of = torch.tensor([0] * 20 + [1] * 5 + [2] * 7)[torch.randperm(32, generator=draw)]
    integers = torch.randint(0, 16, (OUT, 32), generator=draw, dtype=torch.uint8)
    return gathered_groups(integers, 4, torch.rand(OUT, 3).half(), None, group_of)


@pytest.mark.parametrize("name", [*STORAGES, "gathered", "plain"])
def test_the_reported_bytes_are_those_of_all_tensors(name: str) -> None:
    storage = STORAGES.get(name, gathered if name == "gathered" else lambda: PlainStorage(torch.randn(OUT, 96)))()
    assert storage.nbytes == tensors_of(storage)
    for outputs in (1, 64, OUT):
        part = storage.take_outputs(slice(0, outputs))
        assert storage.nbytes_of(outputs) == tensors_of(part)
        if name in STORAGES:
            matrix = part.words()
            assert storage.nbytes_of(outputs, on_gpu=True) == matrix.nbytes == tensors_of(matrix)


@pytest.mark.parametrize("name", ["Q6_K", "Q4_K", "fp8", "mxfp4", "nf4", "activation order"])
def test_reading_rows_makes_no_host_wait_for_a_device(name: str) -> None:
    matrix = STORAGES[name]().words()
    with fake_device() as device:
        tensors = {key: getattr(matrix, key) for key in ("words", "scale", "offset", "units", "order", "table")}
        copies: dict[str, Any] = {
            key: None if one is None else torch.empty(one.shape, dtype=one.dtype, device=device)
            for key, one in tensors.items()
        }
        found = replace(matrix, **copies).rows(torch.empty(5, dtype=torch.int64, device=device))
        assert (found.shape, found.device.type) == ((5, matrix.inputs), device.type)
