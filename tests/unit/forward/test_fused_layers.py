"""Fused decoder layers compute what their modules compute, and only layers of known classes are fused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from tests.support.fakes.layer_kernels import ReferenceKernels
from tests.support.models import tiny
from workers.forward.fused_layers import fuse_layers, undo_fuse
from workers.forward.fused_trial import fuse_if_equal, fuse_on_gpu
from workers.forward.layer_lists import decoder_layers
from workers.forward.loaded_model import WHOLE_PASS, LoadedModel, PassOptions
from workers.forward.partial_pass import WHOLE, PartialPass
from workers.forward.projections import Gated
from workers.forward.runner import ForwardRow, ModelRunner
from workers.forward.weights.plain import DenseKernel, PlainStorage
from workers.kv.pool import KvPool
from workers.model.loading import load_model

Make = Callable[[], PreTrainedModel]
KNOWN = [tiny.llama, tiny.mistral, tiny.qwen2, tiny.qwen3, tiny.qwen3_moe, tiny.mixtral, tiny.gpt_oss]


def loaded(directory: Path, make: Make, device: str = "cpu", dtype: str = "float32") -> LoadedModel:
    path = str(tiny.save(directory, make()))
    return load_model(ModelSection(path=path, device=device, dtype=dtype, native="off", compile="off"))


def logits(model: LoadedModel, taps: tuple[int, ...] = (), options: PassOptions = WHOLE_PASS) -> list[torch.Tensor]:
    """The logits of a prompt and of one token after it, and the hidden states that the taps recorded."""
    pool = KvPool(model.kv_spec, KvSection(block_size=16), blocks=4)
    runner = ModelRunner(model, pool, taps)
    table = pool.new_table()
    found = []
    for tokens in ((5, 3, 9, 2), (7,)):
        row = ForwardRow(table, tokens, select=(len(tokens) - 1,))
        pool.reserve(table, row.end)
        found.append(runner.forward([row], options).clone())
        if runner.hidden is not None:
            found.append(runner.hidden)
        if options.partial is WHOLE:
            runner.commit(row)
    return found


@pytest.mark.parametrize("make", KNOWN)
def test_the_layers_of_known_families_are_fused(tmp_path: Path, make: Make) -> None:
    model = loaded(tmp_path, make)
    expected = logits(model, (0, 1))
    assert fuse_if_equal(model, ReferenceKernels) is None
    for ours, theirs in zip(logits(model, (0, 1)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    undo_fuse(model.module)
    assert not any("forward" in vars(part) for part in model.module.modules())


class WithProducts(ReferenceKernels):
    """Kernels with products of their own before the residual stream."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.gated: list[int] = []
        """Rows of gates and values that no product multiplies."""

    def product(self, weight: torch.Tensor, bias: torch.Tensor | None, *, follows_gate: bool) -> Product:
        return Product(weight, bias, self, most_gated=2 if follows_gate else 0)

    def silu_mul(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        self.gated.append(len(gates))
        return super().silu_mul(gates, values)


@dataclass
class Product:
    weight: torch.Tensor
    bias: torch.Tensor | None
    kernels: WithProducts
    most_gated: int

    def multiply(self, x: torch.Tensor | Gated) -> torch.Tensor:
        if isinstance(x, Gated):
            x = functional.silu(x.gates) * x.values
        return functional.linear(x, self.weight, self.bias)

    def add_and_normalize(
        self, x: torch.Tensor | Gated, stream: torch.Tensor, norm: tuple[torch.Tensor, float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.kernels.rows.append(len(stream))
        return self.kernels.add_and_normalize(stream, self.multiply(x), *norm)


@pytest.mark.parametrize(("make", "products"), [(tiny.llama, 2), (tiny.qwen2, 2), (tiny.qwen3_moe, 1)])
def test_products_add_to_the_residual_stream_by_themselves(
    tmp_path: Path, make: Make, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainStorage, "kernel", lambda self, bias: DenseKernel(self.weight, bias))  # as on a GPU
    model = loaded(tmp_path, make)
    expected, kernels = logits(model), WithProducts()
    assert fuse_layers(model.module, kernels)
    for ours, theirs in zip(logits(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    layers = len(list(decoder_layers(model.module)))
    assert kernels.rows == [*[4] * products * layers, *[1] * products * layers]
    assert kernels.gated == [4] * layers * (products - 1), "of one row, the product after it reads gates and values"


def test_a_pass_without_parts_of_fused_layers(tmp_path: Path) -> None:
    model = loaded(tmp_path, tiny.llama)
    options = [
        PassOptions(PartialPass(layers=1), with_taps=False),
        PassOptions(PartialPass(skip_mlp=frozenset({1})), with_taps=False),
        PassOptions(PartialPass(exit_norm=torch.linspace(0.5, 2, model.hidden_size)), with_taps=False),
    ]
    expected = [logits(model, options=each) for each in options]
    assert fuse_layers(model.module, ReferenceKernels())
    for each, theirs in zip(options, expected, strict=True):
        torch.testing.assert_close(logits(model, options=each), theirs)


@pytest.mark.parametrize("make", [tiny.granite, tiny.gpt2, tiny.opt])
def test_other_families_are_not_fused(tmp_path: Path, make: Make) -> None:
    model = loaded(tmp_path, make)
    assert not fuse_layers(model.module, ReferenceKernels())
    assert not any("forward" in vars(layer) for layer in decoder_layers(model.module))


def test_layers_with_hooks_are_not_fused(tmp_path: Path) -> None:
    model = loaded(tmp_path, tiny.llama)
    hook = next(decoder_layers(model.module)).self_attn.register_forward_pre_hook(lambda *_: None)
    assert not fuse_layers(model.module, ReferenceKernels())
    hook.remove()
    assert fuse_layers(model.module, ReferenceKernels())


class WrongGate(ReferenceKernels):
    def silu_mul(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return super().silu_mul(gates, values) * 1.5


def test_kernels_that_compute_something_else_are_not_used(tmp_path: Path) -> None:
    model = loaded(tmp_path, tiny.llama)
    expected = logits(model)
    problem = fuse_if_equal(model, WrongGate)
    assert problem is not None
    assert problem.startswith("output of layer 0 differ by")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(logits(model), expected, strict=True))


class NoKernels(ReferenceKernels):
    def silu_mul(self, gates: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"no kernel for {gates.shape} and {values.shape}")


def test_kernels_that_cannot_be_compiled_are_not_used(tmp_path: Path) -> None:
    model = loaded(tmp_path, tiny.llama)
    assert "no kernel for" in (fuse_if_equal(model, NoKernels) or "")
    assert not any("forward" in vars(layer) for layer in decoder_layers(model.module))


def test_nothing_is_fused_on_a_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "workers.forward.fused_trial"):
        assert not fuse_on_gpu(loaded(tmp_path, tiny.llama))
    assert not caplog.messages


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("make", KNOWN)
def test_the_kernels_agree_on_a_gpu(tmp_path: Path, make: Make, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "workers.forward.fused_trial"):
        model = loaded(tmp_path, make, "cuda", dtype)
    assert any(message.endswith("are fused") for message in caplog.messages), caplog.messages
    fused = logits(model)
    undo_fuse(model.module)
    bound = 4 * torch.finfo(model.dtype).eps
    for ours, theirs in zip(fused, logits(model), strict=True):
        assert float((ours.float() - theirs.float()).norm()) <= max(bound, 1e-4) * float(theirs.float().norm())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_the_kernels_have_the_same_bits_alone_on_a_gpu(dtype: torch.dtype) -> None:
    pytest.importorskip("triton")
    from workers.forward.layer_kernels import TritonKernels

    kernels, device = TritonKernels(), torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    rows, added, weight = (torch.randn((67, 4096), generator=generator).to(device, dtype) for _ in range(3))
    sums, normalized = kernels.add_and_normalize(rows, added, weight[0], 1e-6)
    gated = kernels.silu_mul(rows, added)
    reference = ReferenceKernels()
    assert torch.equal(sums, rows + added)
    bound = 2 * torch.finfo(dtype).eps
    expected = reference.add_and_normalize(rows, added, weight[0], 1e-6)[1]
    torch.testing.assert_close(normalized, expected, rtol=bound, atol=bound)
    torch.testing.assert_close(gated, reference.silu_mul(rows, added), rtol=bound, atol=bound)
    for row in (0, 31, 66):
        own = slice(row, row + 1)
        assert torch.equal(kernels.add_and_normalize(rows[own], added[own], weight[0], 1e-6)[1], normalized[own])
        assert torch.equal(kernels.silu_mul(rows[own], added[own]), gated[own])
