"""The kernels for experts of a mixture, interpreted or on a GPU: equal to the reference, and free of neighbours."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

from tests.gpu_proof.device import DEVICE, needs_kernels
from workers.forward.weights.experts import swiglu

pytestmark = needs_kernels()

EXPERTS, EACH, HIDDEN, INNER = 6, 2, 72, 40
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mixed(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *, is_transposed: bool = False) -> torch.Tensor:
    from workers.forward.triton.experts import ExpertMatrices, TritonExperts

    first, biases, second = matrices(x.dtype)
    if is_transposed:  # as gpt-oss has them
        first, second = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (first, second))
    gate = (lambda product: swiglu(product)) if is_transposed else swiglu  # torch applies a gate of another kind
    return TritonExperts(ExpertMatrices(first, biases), ExpertMatrices(second), gate).mix(x, chosen, weights)


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, 2 * INNER), (EXPERTS, HIDDEN, INNER)
    first, biases, second = (0.2 * drawn(*shape, seed=seed) for seed, shape in enumerate(shapes))
    return first.to(DEVICE, dtype), biases.to(DEVICE, dtype), second.to(DEVICE, dtype)


def expected(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    first, biases, second = (one.float() for one in matrices(x.dtype))
    sums = torch.zeros_like(x, dtype=torch.float32)
    for token in range(len(x)):
        for expert, weight in zip(chosen[token].tolist(), weights[token].float(), strict=True):
            gate, up = linear(x[token].float(), first[expert], biases[expert]).chunk(2)
            sums[token] += weight * linear(silu(gate) * up, second[expert])
    return sums


def tokens_of(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = drawn(count, EXPERTS, seed=7).softmax(-1)
    weights, chosen = scores.topk(EACH)
    return drawn(count, HIDDEN, seed=8).to(DEVICE, dtype), chosen.to(DEVICE), weights.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7, 60])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_sums_are_those_of_each_token_by_itself(count: int, dtype: torch.dtype, is_transposed: bool) -> None:
    """60 tokens fill wide tiles."""
    tokens = tokens_of(count, dtype)
    reference = expected(*tokens)
    bound = CLOSE[dtype] * float(reference.abs().max())
    torch.testing.assert_close(mixed(*tokens, is_transposed=is_transposed).float(), reference, rtol=0.0, atol=bound)


def test_all_tokens_may_choose_the_same_experts() -> None:
    x, chosen, weights = tokens_of(40, torch.float32)
    chosen[:] = torch.tensor([EXPERTS - 1, 0], device=DEVICE)
    torch.testing.assert_close(mixed(x, chosen, weights), expected(x, chosen, weights), rtol=1e-5, atol=1e-5)


def test_no_token_changes_another_one() -> None:
    """On a GPU, not a bit. The interpreter multiplies by a library, to which a row's place in its tile matters."""
    x, chosen, weights = tokens_of(30, torch.float32)
    whole = mixed(x, chosen, weights)
    for some in (slice(0, 1), slice(4, 9), slice(29, 30)):
        bound = 0.0 if DEVICE.type == "cuda" else 1e-6
        torch.testing.assert_close(mixed(x[some], chosen[some], weights[some]), whole[some], rtol=bound, atol=bound)
