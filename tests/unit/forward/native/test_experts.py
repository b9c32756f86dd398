"""Experts of a mixture are grouped: the rows of all sequences that chose an expert are multiplied together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, GptOssConfig, NemotronHConfig, PreTrainedConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from workers.forward import experts
from workers.forward.experts import FastExperts, fast_experts
from workers.forward.native.packed_experts import PackedExperts
from workers.forward.weights.experts import PlainExperts

HIDDEN, INNER, EXPERTS, EACH = 48, 40, 8, 3
FAMILIES: dict[str, tuple[Any, PreTrainedConfig]] = {
    "qwen3_moe": (
        Qwen3MoeExperts,
        Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS),
    ),
    "deepseek_v3": (
        DeepseekV3Experts,
        DeepseekV3Config(hidden_size=HIDDEN, moe_intermediate_size=INNER, n_routed_experts=EXPERTS),
    ),
    "gpt_oss": (GptOssExperts, GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS)),
    "nemotron_h": (
        NemotronHExperts,
        NemotronHConfig(hidden_size=HIDDEN, moe_intermediate_size=INNER, n_routed_experts=EXPERTS),
    ),
}
"""Gates and factors, one after another; the same; alternating, with biases and transposed matrices; no gates."""
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


def layer_of(family: str, dtype: torch.dtype) -> nn.Module:
    """The experts of a layer with random weights, as the loader has them."""
    kind, config = FAMILIES[family]
    config._experts_implementation = "grouped_mm"
    layer: nn.Module = kind(config).to(dtype).requires_grad_(False)
    draw = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
    return layer


def replaced(layer: nn.Module, code: str, quantization: str = "none") -> FastExperts:
    fast = fast_experts(layer, quantization, code)
    assert fast is not None
    return fast


def tokens_of(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, the experts of each token, and their weights."""
    draw = torch.Generator().manual_seed(count)
    scores, chosen = torch.rand(count, EXPERTS, generator=draw).topk(EACH)
    return torch.randn(count, HIDDEN, generator=draw).to(dtype), chosen, scores.to(dtype)


def check_alone(mixture: nn.Module, dtype: torch.dtype) -> None:
    """Some tokens have the same bits without the others."""
    x, chosen, weights = tokens_of(40, dtype)
    whole = mixture(x, chosen, weights)
    for some in (slice(0, 1), slice(39, 40), slice(5, 8), slice(10, 31)):
        assert torch.equal(mixture(x[some], chosen[some], weights[some]), whole[some])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_sums_are_those_of_the_modules_own_code(family: str, dtype: torch.dtype, code: str) -> None:
    layer = layer_of(family, dtype)
    fast = replaced(layer, code)
    assert isinstance(fast.kernel, PackedExperts)
    for count in (1, 2, 7, 33):
        tokens = tokens_of(count, dtype)
        expected, found = layer(*tokens), fast(*tokens)
        assert found.dtype is dtype
        largest = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype] * largest)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_token_changes_a_bit_of_another_one(dtype: torch.dtype, quantization: str, code: str) -> None:
    check_alone(replaced(layer_of("gpt_oss", dtype), code, quantization), dtype)


def test_tile_registers_change_nothing_of_that(emulated: str) -> None:
    layer = layer_of("qwen3_moe", torch.bfloat16)
    fast = replaced(layer, emulated)
    tokens = tokens_of(12, torch.bfloat16)
    expected = layer(*tokens)
    torch.testing.assert_close(fast(*tokens), expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max()))
    check_alone(fast, torch.bfloat16)


def test_a_number_that_is_no_experts_adds_nothing(code: str) -> None:
    fast = replaced(layer_of("gpt_oss", torch.float32), code)
    x, chosen, weights = tokens_of(5, torch.float32)
    fewer = fast(x, chosen[:, :2], weights[:, :2])
    chosen[:, 2] = EXPERTS
    assert torch.equal(fast(x, chosen, weights), fewer)
    assert torch.equal(fast(x, torch.full_like(chosen, EXPERTS), weights), torch.zeros_like(x))
    assert fast(x[:0], chosen[:0], weights[:0]).shape == (0, HIDDEN)


def test_experts_in_8_bits_take_a_byte_for_each_weight(code: str) -> None:
    layer = layer_of("qwen3_moe", torch.float32)
    fast = replaced(layer, code, "int8")
    assert isinstance(fast.kernel, PackedExperts)
    lanes = 16  # outputs are padded to blocks
    assert fast.kernel.nbytes <= EXPERTS * (2 * (INNER + lanes) * HIDDEN + HIDDEN * INNER)
    tokens = tokens_of(9, torch.float32)
    expected = layer(*tokens)
    torch.testing.assert_close(fast(*tokens), expected, rtol=0.0, atol=0.02 * float(expected.abs().max()))


def test_without_a_compiler_torch_multiplies(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of("gpt_oss", torch.float32)
    packed = replaced(layer, code)
    monkeypatch.setattr(experts, "load_library", lambda _: None)
    plain = replaced(layer, code)
    assert isinstance(plain.kernel, PlainExperts)
    tokens = tokens_of(9, torch.float32)
    torch.testing.assert_close(plain(*tokens), packed(*tokens), rtol=1e-5, atol=1e-4)
    check_alone(plain, torch.float32)


def test_experts_with_code_of_their_own_stay_as_they_are(code: str) -> None:
    class Other(Qwen3MoeExperts):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return x

    config = FAMILIES["qwen3_moe"][1]
    config._experts_implementation = "grouped_mm"
    assert fast_experts(Other(config), "none", code) is None
