"""The kernels of recurrent layers, interpreted or on a GPU: equal to their definition, in every division of a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.gpu_proof.device import DEVICE, needs_kernels
from workers.forward.recurrence.base import DeltaInputs, RecurrenceKernels, SpaceInputs
from workers.forward.recurrence.plan import RecurrencePlan, StateRow, plan_recurrence
from workers.forward.recurrence.reference import ReferenceKernels
from workers.kv.states import SequenceStates

pytestmark = needs_kernels()

SLOTS = 40
CHAIN, TREE = TokenTree.chain(range(3)), TokenTree(tuple(range(6)), (-1, 0, 0, 1, -1, 4))
ROWS: dict[str, list[tuple[int, TokenTree]]] = {
    "prompt": [(9, EMPTY_TREE)],
    "all": [(1, EMPTY_TREE), (5, EMPTY_TREE), (1, CHAIN), (2, TREE)],
}


def plan_of(rows: Sequence[tuple[int, TokenTree]], committed: Sequence[int] = (), first: int = 8) -> RecurrencePlan:
    """Rows of committed tokens and a tree. Each has a committed state in a slot, and stores others from `first` on."""
    found = []
    for index, (fresh, tree) in enumerate(rows):
        slots = [*range(first, first + 1 + len(tree))]
        first += len(slots)
        states = SequenceStates(committed=committed[index] if committed else index, fresh=slots)
        found.append(StateRow(fresh, tree, states))
    return plan_recurrence(found, DEVICE)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@dataclass(frozen=True)
class Layer:
    """A recurrence over all its tokens, and what its states look like."""

    run: Callable[..., torch.Tensor]
    """(kernels, first token, last token, states, plan) → outputs."""
    state: tuple[int, ...]
    dtype: torch.dtype

    def slots(self) -> torch.Tensor:
        """States of numbers, the first of zeros; those that nobody has stored are not numbers."""
        states = drawn(SLOTS, *self.state, seed=9).to(self.dtype)
        states[0] = 0
        states[8:] = float("nan")
        return states


def convolution(dtype: torch.dtype, channels: int, width: int, stored: int, has_bias: bool = True) -> Layer:
    inputs, weight, bias = drawn(32, channels + 3, dtype=dtype), drawn(channels, width, dtype=dtype), drawn(channels)

    def run(
        kernels: RecurrenceKernels, begin: int, end: int, states: torch.Tensor, plan: RecurrencePlan
    ) -> torch.Tensor:
        part = inputs[begin:end, :channels]  # columns of a product
        activation = "silu" if has_bias else None
        return kernels.convolution(part, weight, bias.to(dtype) if has_bias else None, states, plan, activation)

    return Layer(run, (channels, stored), dtype)


def delta_rule(dtype: torch.dtype, heads: int, key_heads: int, keys: int, values: int) -> Layer:
    query, key = (torch.nn.functional.normalize(drawn(32, key_heads, keys, seed=seed), dim=-1) for seed in (1, 2))
    whole = DeltaInputs(
        query / keys**0.5,
        key,
        drawn(32, heads, values, dtype=dtype),
        -drawn(32, heads).abs(),
        drawn(32, heads).sigmoid(),
    )

    def run(
        kernels: RecurrenceKernels, begin: int, end: int, states: torch.Tensor, plan: RecurrencePlan
    ) -> torch.Tensor:
        names = ("query", "key", "value", "log_decay", "beta")
        part = replace(whole, **{name: getattr(whole, name)[begin:end] for name in names})
        if isinstance(kernels, ReferenceKernels):
            shared = {name: getattr(part, name).repeat_interleave(heads // key_heads, 1) for name in names[:2]}
            part = replace(part, **shared)
        return kernels.gated_delta_rule(part, states, plan)

    return Layer(run, (heads, keys, values), torch.float32)


def state_space(dtype: torch.dtype, heads: int, dim: int, groups: int, size: int, of_channels: bool = False) -> Layer:
    a = -drawn(*((heads, size) if of_channels else (heads,)), seed=3).abs()
    whole = SpaceInputs(
        inputs=drawn(32, heads, dim, dtype=dtype), steps=drawn(32, heads, seed=4).abs(), a=a,
        b=drawn(32, groups, size, dtype=dtype, seed=5), c=drawn(32, groups, size, dtype=dtype, seed=6), d=drawn(heads),
    )  # fmt: skip

    def run(
        kernels: RecurrenceKernels, begin: int, end: int, states: torch.Tensor, plan: RecurrencePlan
    ) -> torch.Tensor:
        names = ("inputs", "steps", "b", "c")
        part = replace(whole, **{name: getattr(whole, name)[begin:end] for name in names})
        return kernels.state_space(part, states, plan)

    return Layer(run, (heads, dim, size), torch.float32)


LAYERS = {
    "convolution": convolution(torch.float32, 70, 4, 4),
    "wide convolution": convolution(torch.bfloat16, 600, 4, 3),
    "convolution of three": convolution(torch.float16, 64, 3, 3, has_bias=False),
    "delta rule": delta_rule(torch.float32, 2, 1, 16, 7),
    "delta rule of odd keys": delta_rule(torch.bfloat16, 1, 1, 24, 12),
    "state space": state_space(torch.float32, 4, 16, 2, 32),
    "state space of odd heads": state_space(torch.bfloat16, 2, 12, 1, 20),
    "state space of channels": state_space(torch.float32, 24, 1, 1, 16, of_channels=True),
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Layer:
    return LAYERS[request.param]


def kernels() -> RecurrenceKernels:
    from workers.forward.gpu_recurrence import TritonRecurrences

    return TritonRecurrences()


def tokens_of(rows: Sequence[tuple[int, TokenTree]]) -> int:
    return sum(fresh + len(tree) for fresh, tree in rows)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_they_compute_what_their_definition_says(layer: Layer, rows: list[tuple[int, TokenTree]]) -> None:
    plan, count = plan_of(rows), tokens_of(rows)
    ours, theirs = layer.slots(), layer.slots()
    found = layer.run(kernels(), 0, count, ours, plan)
    expected = layer.run(ReferenceKernels(), 0, count, theirs, plan)
    bound = (2 if found.dtype == torch.bfloat16 else 1) * torch.finfo(found.dtype).eps
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found.float(), expected.float(), rtol=4 * bound, atol=4e-6 + bound)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("cuts", [(1, 2, 3), (8,)])
def test_a_prompt_has_the_same_bits_in_every_division(layer: Layer, cuts: tuple[int, ...]) -> None:
    whole, divided = layer.slots(), layer.slots()
    expected = layer.run(kernels(), 0, 9, whole, plan_of([(9, EMPTY_TREE)], [1], first=30))
    outputs, slot = [], 1
    for index, (begin, end) in enumerate(zip((0, *cuts), (*cuts, 9), strict=True)):
        plan = plan_of([(end - begin, EMPTY_TREE)], [slot], first=(slot := 10 + index) if end < 9 else 30)
        outputs.append(layer.run(kernels(), begin, end, divided, plan))
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(divided[30], whole[30])


def test_a_chain_has_the_bits_of_single_tokens(layer: Layer) -> None:
    together, alone = layer.slots(), layer.slots()
    expected = layer.run(kernels(), 0, 4, together, plan_of([(1, CHAIN)], [2], first=20))
    slot = 2
    for token in range(4):
        plan = plan_of([(1, EMPTY_TREE)], [slot], first=(slot := 20 + token))
        assert torch.equal(layer.run(kernels(), token, token + 1, alone, plan), expected[token : token + 1])
    assert torch.equal(together[20:24], alone[20:24])


def test_a_node_has_the_bits_of_its_path(layer: Layer) -> None:
    """Node 3 of the tree follows node 1: its state comes from the slot of another node than the one before."""
    together, alone = layer.slots(), layer.slots()
    expected = layer.run(kernels(), 0, 8, together, plan_of([(2, TREE)], [3], first=20))
    slot = 3
    for token, target in ((0, 30), (1, 31), (2, 32), (3, 33), (5, 34)):
        found = layer.run(kernels(), token, token + 1, alone, plan_of([(1, EMPTY_TREE)], [slot], first=target))
        slot = target
        assert torch.equal(found, expected[token : token + 1])
    assert torch.equal(together[24], alone[34])


def test_neighbours_change_no_bit(layer: Layer) -> None:
    """Each row alone gives what it gives beside the others, in another place of the step."""
    rows, committed = ROWS["all"], [1, 0, 2, 3]
    together = layer.slots()
    expected = layer.run(kernels(), 0, tokens_of(rows), together, plan_of(rows, committed))
    begin, first = 0, 8
    for row, slot in zip(rows, committed, strict=True):
        alone, end = layer.slots(), begin + tokens_of([row])
        found = layer.run(kernels(), begin, end, alone, plan_of([row], [slot], first=first))
        stored = slice(first, first + 1 + len(row[1]))
        assert torch.equal(found, expected[begin:end])
        assert torch.equal(alone[stored], together[stored])
        begin, first = end, stored.stop


def test_padding_changes_no_bit(layer: Layer) -> None:
    """A step of a CUDA graph ends with rows without tokens, and with tokens of no row."""
    rows, plan = [(2, TREE)], plan_of([(2, TREE)])
    source, target, parents = (
        torch.cat([own, own.new_full((3,), padding)])
        for own, padding in ((plan.source, 0), (plan.target, -1), (plan.parents, -1))
    )
    starts = torch.cat([plan.row_starts, plan.row_starts[-1:]])
    padded = RecurrencePlan(starts, source, target, parents, plan.moves)
    own, other, count = layer.slots(), layer.slots(), tokens_of(rows)
    expected = layer.run(kernels(), 0, count, own, plan)
    assert torch.equal(layer.run(kernels(), 0, count + 3, other, padded)[:count], expected)
    assert torch.equal(own.nan_to_num(7), other.nan_to_num(7))
