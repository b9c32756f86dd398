"""The kernels for experts of a mixture, interpreted or on a GPU: equal to the reference, and free of neighbours."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from tests.gpu_proof.device import DEVICE, needs_kernels
from workers.forward.expert_choice import ExpertChoice
from workers.forward.weights.base import Storage
from workers.forward.weights.experts import ClampedSwiglu, Expert, Gate, StoredExperts, swiglu
from workers.forward.weights.floats import mxfp4_storage

pytestmark = needs_kernels()

EXPERTS, EACH, HIDDEN, INNER = 6, 2, 72, 40
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
GATES: dict[str, Gate] = {
    "swiglu": swiglu,
    "clamped": ClampedSwiglu(1.7, 0.5),
    "by torch": lambda product: swiglu(product),  # a gate that the kernels do not know
}


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, 2 * INNER), (EXPERTS, HIDDEN, INNER), (EXPERTS, HIDDEN)
    return tuple((0.2 * drawn(*shape, seed=seed)).to(DEVICE, dtype) for seed, shape in enumerate(shapes))


Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def kernels(dtype: torch.dtype, gate: Gate = swiglu) -> Any:
    from workers.forward.triton.experts import Matrices, TritonExperts

    first, first_biases, second, second_biases = matrices(dtype)
    return TritonExperts(Matrices(first, first_biases), Matrices(second, second_biases), gate)


def mixed(tokens: Tokens, gate: Gate = swiglu) -> torch.Tensor:
    sums: torch.Tensor = kernels(tokens[0].dtype, gate).mix(*tokens)
    return sums


def expected(tokens: Tokens, gate: Gate = swiglu) -> torch.Tensor:
    x, chosen, weights = tokens
    first, first_biases, second, second_biases = (one.float() for one in matrices(x.dtype))
    sums = torch.zeros_like(x, dtype=torch.float32)
    for token in range(len(x)):
        for expert, weight in zip(chosen[token].tolist(), weights[token].float(), strict=True):
            inner = gate(linear(x[token].float(), first[expert], first_biases[expert])[None])[0]
            sums[token] += weight * linear(inner, second[expert], second_biases[expert])
    return sums


def tokens_of(count: int, dtype: torch.dtype) -> Tokens:
    weights, chosen = drawn(count, EXPERTS, seed=7).softmax(-1).topk(EACH)
    return drawn(count, HIDDEN, seed=8).to(DEVICE, dtype), chosen.to(DEVICE), weights.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 50])
@pytest.mark.parametrize("gate", GATES)
def test_sums_are_those_of_each_token_by_itself(count: int, dtype: torch.dtype, gate: str) -> None:
    """50 tokens fill wide tiles."""
    tokens = tokens_of(count, dtype)
    reference = expected(tokens, GATES[gate])
    bound = CLOSE[dtype] * float(reference.abs().max())
    torch.testing.assert_close(mixed(tokens, GATES[gate]).float(), reference, rtol=0.0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_added_to_the_residual_stream_and_normalized_without_neighbours(dtype: torch.dtype) -> None:
    from workers.forward.triton.norm import add_and_normalize

    tokens, stream = tokens_of(5, dtype), drawn(5, HIDDEN, seed=9).to(DEVICE, dtype)
    norm = drawn(HIDDEN, seed=10).to(DEVICE, dtype), 1e-6
    found = kernels(dtype).mix_add_and_normalize(*tokens, stream, norm)
    apart = add_and_normalize(stream, mixed(tokens), *norm)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, apart, strict=True))
    stream[:2], stream[3:] = math.nan, 1e3
    others = kernels(dtype).mix_add_and_normalize(*tokens, stream, norm)
    assert all(torch.equal(ours[2], theirs[2]) for ours, theirs in zip(others, found, strict=True))


@pytest.mark.parametrize("count", [3, 600])
def test_rows_and_tiles_are_listed_by_expert(count: int) -> None:
    from workers.forward.triton.experts import route

    chosen = torch.randint(-1, EXPERTS + 2, (count, EACH), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    routing = route(chosen, EXPERTS)
    flat, order = chosen.flatten().tolist(), routing.order.tolist()
    row = 0
    tiles = iter(routing.tiles[: int(routing.count)].tolist())
    for expert in range(EXPERTS):
        places = [place for place, one in enumerate(flat) if one == expert]
        assert order[row : row + len(places)] == places
        assert [routing.rows.flatten().tolist()[place] for place in places] == [*range(row, row + len(places))]
        end = row + len(places)
        for begin in range(row, end, routing.tile):
            assert next(tiles) == [expert, begin, end]
        row = end
    assert next(tiles, None) is None
    assert all(
        found == -1 for one, found in zip(flat, routing.rows.flatten().tolist(), strict=True) if not 0 <= one < EXPERTS
    )


def test_all_tokens_may_choose_the_same_experts() -> None:
    tokens = tokens_of(40, torch.float32)
    tokens[1][:] = torch.tensor([EXPERTS - 1, 0], device=DEVICE)
    torch.testing.assert_close(mixed(tokens), expected(tokens), rtol=1e-5, atol=1e-5)


def test_a_number_that_is_no_experts_adds_nothing() -> None:
    x, chosen, weights = tokens_of(5, torch.float32)
    fewer = expected((x, chosen[:, :1], weights[:, :1]))
    chosen[:, 1] = torch.tensor([EXPERTS, -1, 3 * EXPERTS, EXPERTS, -7], device=DEVICE)
    torch.testing.assert_close(mixed((x, chosen, weights)), fewer, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter
@pytest.mark.parametrize("experts", [6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_expert_is_read_for_padding_which_is_nan(dtype: torch.dtype, experts: int) -> None:
    from workers.forward.triton.experts import choose, route

    logits = drawn(5, experts, seed=11).to(DEVICE, dtype)
    logits[2:] = math.nan
    weights, chosen = choose(logits, ExpertChoice(EACH, is_of_all=False, is_wide=False))
    assert (chosen[2:] >= experts).all()
    assert weights[:2].isfinite().all()
    routing = route(chosen, experts)
    rows = sorted(routing.rows[:2].flatten().tolist())
    assert rows == list(range(2 * EACH))
    assert (routing.rows[2:] == -1).all()
    assert int(routing.count) == len(set(chosen[:2].flatten().tolist()))


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("is_of_all", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_takes_the_experts_with_the_largest_logits(dtype: torch.dtype, is_of_all: bool, is_wide: bool) -> None:
    from workers.forward.triton.experts import choose

    choice = ExpertChoice(3, is_of_all, is_wide)
    logits = (3 * drawn(9, 12, seed=3)).to(DEVICE, dtype)
    logits[4, 3:7] = 9.0  # of equal ones the first are chosen
    weights, chosen = choose(logits, choice)
    expected_weights, expected_chosen = choice.of(logits)
    assert weights.dtype is expected_weights.dtype
    torch.testing.assert_close(weights, expected_weights, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert chosen[4].tolist() == [3, 4, 5]
    assert torch.equal(logits.gather(1, chosen), logits.gather(1, expected_chosen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_token_changes_another_one(dtype: torch.dtype) -> None:
    """On a GPU, not a bit. The interpreter multiplies by a library, to which a row's place in its tile matters."""
    x, chosen, weights = tokens_of(50, dtype)
    whole = mixed((x, chosen, weights))
    roundings = 2**-21 * float(whole.abs().max()) if dtype == torch.float32 else 2**-6
    bound = 0.0 if DEVICE.type == "cuda" else roundings
    for some in (slice(0, 1), slice(4, 9), slice(49, 50)):
        alone = mixed((x[some], chosen[some], weights[some]))
        torch.testing.assert_close(alone, whole[some], rtol=bound, atol=bound)


@pytest.mark.parametrize("inputs", [128, 96], ids=["whole steps", "an odd number of blocks"])
def test_experts_in_mxfp4_are_multiplied_as_they_are_stored(inputs: int) -> None:
    from workers.forward.expert_trial import triton_experts

    draw = torch.Generator().manual_seed(0)

    def matrix(outputs: int, width: int) -> Storage:
        blocks = torch.randint(0, 256, (outputs, width // 32, 16), generator=draw, dtype=torch.uint8)
        return mxfp4_storage(blocks, torch.randint(117, 125, blocks.shape[:2], generator=draw, dtype=torch.uint8))

    gate = ClampedSwiglu(1.7, 2.0)
    experts = [
        Expert(matrix(128, inputs), drawn(128, seed=5), matrix(inputs, 64), drawn(inputs, seed=9))
        for _ in range(EXPERTS)
    ]
    stored = StoredExperts(experts, gate).to(DEVICE)
    kernel = triton_experts(stored)
    for count in (3, 50):
        _, chosen, weights = tokens_of(count, torch.float32)
        x = drawn(count, inputs, seed=3).to(DEVICE)
        reference = stored(x, chosen, weights)
        bound = 1e-5 * float(reference.abs().max())
        torch.testing.assert_close(kernel.mix(x, chosen, weights), reference, rtol=0.0, atol=bound)
