"""The packed half of a drafter's layer computes what torch computes with the same weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

from workers.forward.linear import quantize
from workers.forward.native import build, packed_layer, packed_linear
from workers.forward.native.packed_layer import OutputWeights, PackedLayerOutput

DTYPES = (torch.float32, torch.bfloat16, torch.int8)
SIZES = ((48, 40, 80), (36, 52, 70), (7, 9, 11))
"""(hidden, width of the attention's output, inner). Not all fill the blocks of packed weights."""


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * shape[-1] ** -0.5


def weights_of(hidden: int, inputs: int, inner: int) -> OutputWeights:
    return OutputWeights(
        out=values(hidden, inputs),
        norm=1.0 + values(hidden),
        gate=values(inner, hidden),
        up=values(inner, hidden) + 0.1,
        down=values(hidden, inner),
        epsilon=1e-5,
    )


def expected(
    weights: OutputWeights, dtype: torch.dtype, residual: torch.Tensor, attended: torch.Tensor
) -> torch.Tensor:
    """The output in float64, with the weights as the dtype represents them."""

    def stored(weight: torch.Tensor) -> torch.Tensor:
        if dtype is not torch.int8:
            return weight.to(dtype).double()
        integers, scale = quantize(weight)
        return integers.double() * scale.double()[:, None]

    h = residual.double() + linear(attended.double(), stored(weights.out))
    n = rms_norm(h, (len(weights.norm),), weights.norm.double(), weights.epsilon)
    inner = silu(linear(n, stored(weights.gate))) * linear(n, stored(weights.up))
    return (h + linear(inner, stored(weights.down))).float()


def check(dtype: torch.dtype, code: Path) -> None:
    for hidden, inputs, inner in SIZES:
        weights = weights_of(hidden, inputs, inner)
        layer = PackedLayerOutput(weights, dtype, str(code))
        for rows in (1, 3, 9):
            residual, attended = values(rows, hidden) * 5, values(rows, inputs) * 5
            before = residual.clone()
            tolerance = 3e-2 if dtype is torch.bfloat16 else 1e-4  # activations are rounded to bfloat16
            torch.testing.assert_close(
                layer.apply(residual, attended),
                expected(weights, dtype, residual, attended),
                rtol=tolerance,
                atol=tolerance,
            )
            assert torch.equal(residual, before)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("width", [(), ("-DLANES=8", "-DREGISTERS=16")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_compute_a_layer_after_its_attention(
    dtype: torch.dtype, width: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if width:
        monkeypatch.setattr(build, "_FLAGS", ["-O2", "-fPIC", "-fopenmp", *width])
    check(dtype, tmp_path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_compiler_torch_computes_it(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (packed_layer, packed_linear):
        monkeypatch.setattr(module, "load_library", lambda _: None)
    check(dtype, tmp_path)


def test_other_shapes_and_dtypes_are_refused(tmp_path: Path) -> None:
    layer = PackedLayerOutput(weights_of(48, 40, 80), directory=str(tmp_path))
    for residual, attended, name in (
        (values(2, 48), values(3, 40), "attended"),
        (values(2, 40), values(2, 40), "residual"),
        (values(2, 48), values(2, 40).bfloat16(), "attended"),
    ):
        with pytest.raises(ValueError, match=f"{name}: .* is refused; it must be float32"):
            layer.apply(residual, attended)
