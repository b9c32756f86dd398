"""Recurrences over slots: the bits of a token depend on the tokens before it alone, however they come in steps."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.support.engines.kept_kernels import NARROW, portable
from workers.forward.native import build
from workers.forward.native.recurrence import NativeRecurrence
from workers.forward.recurrence.base import DeltaInputs, RecurrenceKernels, SpaceInputs
from workers.forward.recurrence.plan import RecurrencePlan, StateRow, plan_recurrence
from workers.forward.recurrence.reference import ReferenceKernels
from workers.kv.states import SequenceStates

CPU = torch.device("cpu")
TOKENS, SLOTS = 12, 24
Inputs = dict[str, torch.Tensor]
Compute = Callable[[Inputs, torch.Tensor, RecurrencePlan], torch.Tensor]


@dataclass(frozen=True)
class Recurrence:
    """A recurrence, what it reads of each token `[tokens, …]`, and the shape of its state."""

    compute: Compute
    tokens: Inputs
    state: tuple[int, ...]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def convolution(kernels: RecurrenceKernels) -> Recurrence:
    weight, bias = numbers(37, 4), numbers(37)

    def compute(of: Inputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        return kernels.convolution(of["inputs"], weight, bias, states, plan, "silu")

    return Recurrence(compute, {"inputs": numbers(TOKENS, 37)}, (37, 4))


def delta(kernels: RecurrenceKernels) -> Recurrence:
    key = torch.nn.functional.normalize(numbers(TOKENS, 3, 9), dim=-1)
    tokens = {"query": numbers(TOKENS, 3, 9, seed=1), "key": key, "value": numbers(TOKENS, 3, 37, seed=2)}
    tokens |= {"log_decay": -numbers(TOKENS, 3).abs(), "beta": numbers(TOKENS, 3, seed=3).sigmoid()}

    def compute(of: Inputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        return kernels.gated_delta_rule(DeltaInputs(**of), states, plan)

    return Recurrence(compute, tokens, (3, 9, 37))


def space(kernels: RecurrenceKernels, *, own_decays: bool = False) -> Recurrence:
    a = -numbers(6, 19).abs() if own_decays else -numbers(6).abs()
    tokens = {"inputs": numbers(TOKENS, 6, 5), "steps": numbers(TOKENS, 6, seed=1).abs()}
    tokens |= {"b": numbers(TOKENS, 2, 19, seed=2), "c": numbers(TOKENS, 2, 19, seed=3)}

    def compute(of: Inputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        return kernels.state_space(SpaceInputs(a=a, d=numbers(6), **of), states, plan)

    return Recurrence(compute, tokens, (6, 5, 19))


KINDS: dict[str, Callable[[RecurrenceKernels], Recurrence]] = {
    "convolution": convolution,
    "delta": delta,
    "space": space,
    "own_decays": lambda kernels: space(kernels, own_decays=True),
}


@pytest.fixture(scope="module", params=["reference", "native", "portable"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RecurrenceKernels:
    """The reference, the kernels of this processor, and those of one without known vectors."""
    if request.param == "reference":
        return ReferenceKernels()
    compiler = build._find_compiler()
    assert compiler is not None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "_SOURCES", ("recurrence.c",))
        if request.param == "portable":
            patched.setattr(build, "_FLAGS", portable(*NARROW))
        return NativeRecurrence(ctypes.CDLL(str(build._build(compiler, tmp_path_factory.mktemp("code")))))


@pytest.fixture(params=KINDS)
def recurrence(request: pytest.FixtureRequest, kernels: RecurrenceKernels) -> Recurrence:
    return KINDS[request.param](kernels)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compute_what_the_reference_computes(kernels: RecurrenceKernels, kind: str) -> None:
    found, wanted = (Steps(KINDS[kind](own)) for own in (kernels, ReferenceKernels()))
    outputs = []
    for steps in (found, wanted):
        rows = [(steps.row(2), (7, 9)), (steps.row(5, 0, TokenTree((1, 2, 3), (-1, 0, -1))), range(8))]
        outputs.append(steps.run(rows))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.states, wanted.states, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_convolution_keeps_its_inputs_as_they_are(kernels: RecurrenceKernels) -> None:
    """States of a convolution may be bfloat16, which holds inputs of that type exactly."""
    weight, inputs = numbers(37, 3), numbers(TOKENS, 37).bfloat16()
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        states = torch.zeros(3, 37, 3, dtype=dtype)
        for first, last, committed, slot in ((0, 5, 0, 1), (5, TOKENS, 1, 2)):
            plan = plan_recurrence([StateRow(last - first, EMPTY_TREE, SequenceStates(committed, [slot]))], CPU)
            found.append(kernels.convolution(inputs[first:last], weight, None, states, plan, None))
        assert torch.equal(states[2], inputs[-3:].T)
    assert found[0].dtype is torch.bfloat16
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


class Steps:
    """Steps over one tensor of slots, whose content is wrong until it is written."""

    def __init__(self, recurrence: Recurrence) -> None:
        self.of = recurrence
        self.states = torch.full((1 + SLOTS, *recurrence.state), torch.nan)
        self.states[0] = 0
        self._next = 0

    def take(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count + 1, self._next + 1))

    def run(self, rows: Sequence[tuple[StateRow, Sequence[int]]]) -> torch.Tensor:
        """Outputs of rows, each with the numbers of its tokens."""
        chosen = [token for _, tokens in rows for token in tokens]
        given = {name: values[chosen] for name, values in self.of.tokens.items()}
        return self.of.compute(given, self.states, plan_recurrence([row for row, _ in rows], CPU))

    def row(self, fresh: int, committed: int = 0, tree: TokenTree = EMPTY_TREE) -> StateRow:
        return StateRow(fresh, tree, SequenceStates(committed=committed, fresh=self.take(1 + len(tree))))


def test_a_plan_names_the_slots_of_each_token() -> None:
    tree = TokenTree((0, 1, 2, 3, 4), (-1, 0, 0, -1, 3))
    rows = [
        StateRow(3, tree, SequenceStates(committed=7, fresh=[10, 11, 12, 13, 14, 15]), {2: 20}),
        StateRow(1, EMPTY_TREE, SequenceStates(fresh=[16])),
    ]
    plan = plan_recurrence(rows, CPU)
    assert plan.row_starts.tolist() == [0, 8, 9]
    assert plan.source.tolist() == [7, -1, -1, -1, -1, 11, 10, -1, 0]
    assert plan.target.tolist() == [-1, 20, 10, 11, 12, 13, 14, 15, 16]
    assert {one.dtype for one in (plan.row_starts, plan.source, plan.target)} == {torch.int32}
    with pytest.raises(ValueError, match="without committed tokens"):
        plan_recurrence([replace(rows[1], fresh=0)], CPU)


def test_no_chunk_tree_or_neighbor_changes_a_bit(recurrence: Recurrence) -> None:
    steps = Steps(recurrence)
    whole = steps.row(TOKENS)
    outputs = steps.run([(whole, range(TOKENS))])
    assert outputs.abs().min() > 0
    wanted = steps.states[whole.states.fresh[0]]
    committed = 0
    for first, last in ((0, 1), (1, 6), (6, 8)):
        row = steps.row(last - first, committed)
        neighbor = steps.row(2)
        found = steps.run([(neighbor, (5, 3)), (row, range(first, last))])
        assert torch.equal(found[2:], outputs[first:last])
        committed = row.states.fresh[0]
    row = steps.row(1, committed, TokenTree((1, 2, 3, 4, 5), (-1, 0, 0, 2, 3)))
    found = steps.run([(row, (8, 9, 3, 10, 11, 2))])
    assert torch.equal(found[[0, 1, 3, 4]], outputs[8:])
    assert torch.equal(steps.states[row.states.fresh[4]], wanted)
    assert not steps.states[0].any()


def test_kept_states_are_those_after_their_tokens(recurrence: Recurrence) -> None:
    steps = Steps(recurrence)
    part = steps.row(4)
    steps.run([(part, range(4))])
    kept = replace(steps.row(9), kept={4: SLOTS})
    steps.run([(kept, range(9))])
    assert torch.equal(steps.states[SLOTS], steps.states[part.states.fresh[0]])
