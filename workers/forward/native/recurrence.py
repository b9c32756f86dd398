"""Recurrences by the CPU kernels. recurrence.c has them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from workers.forward.native.build import load_library
from workers.forward.recurrence.base import DeltaInputs, SpaceInputs
from workers.forward.recurrence.plan import RecurrencePlan

_KINDS = {torch.float32: 0, torch.bfloat16: 1}  # as in numbers.h


class _Plan(ctypes.Structure):
    """The C structure of a `RecurrencePlan`."""

    _fields_ = [("rows", ctypes.c_int64), *((name, ctypes.c_void_p) for name in ("row_starts", "source", "target"))]


class NativeRecurrence:
    """`RecurrenceKernels` on CPU. States are float32, those of convolutions float32 or bfloat16."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def convolution(
        self,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        plan: RecurrencePlan,
        activation: str | None,
    ) -> torch.Tensor:
        """A causal convolution of each channel, `[tokens, channels]`, as `RecurrenceKernels` defines it.

        Raises `ValueError` for states that are neither float32 nor bfloat16.
        """
        if states.dtype not in _KINDS:
            raise ValueError(f"states: {states.dtype} is refused; it must be float32 or bfloat16")
        sizes = (*weight.shape, states.shape[2], _KINDS[states.dtype], int(activation == "silu"))
        output = plan.output(inputs.shape, torch.empty(0))
        _call(self._library.pilotfish_convolution, plan, sizes, (inputs, weight, bias), (states, output))
        return output.to(inputs.dtype)

    def gated_delta_rule(self, of: DeltaInputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        output = plan.output(of.value.shape, torch.empty(0))
        given = (of.query, of.key, of.value, of.log_decay, of.beta)
        _call(self._library.pilotfish_gated_delta_rule, plan, states.shape[1:], given, (states, output))
        return output.to(of.value.dtype)

    def state_space(self, of: SpaceInputs, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        output = plan.output(of.inputs.shape, torch.empty(0))
        sizes = (*of.inputs.shape[1:], *of.b.shape[1:], int(of.a.dim() == 2))
        given = (of.inputs, of.steps, of.a, of.b, of.c, of.d)
        _call(self._library.pilotfish_state_space, plan, sizes, given, (states, output))
        return output.to(of.inputs.dtype)


def load_recurrence(directory: str | None) -> NativeRecurrence | None:
    """The kernels; `None` if they cannot be built. `directory` keeps the compiled ones."""
    library = load_library(directory)
    return None if library is None else NativeRecurrence(library)


def _call(
    function: Callable[..., None],
    plan: RecurrencePlan,
    sizes: Sequence[int],
    given: Sequence[torch.Tensor | None],
    written: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Call a kernel with what it reads as float32 numbers, the states and the output. All are written in place."""
    if not written[0].is_contiguous():
        raise ValueError("states: a view with gaps is refused; they must be contiguous")
    wide = [None if one is None else one.float().contiguous() for one in given]
    moves = (plan.row_starts, plan.source, plan.target)
    function(
        ctypes.byref(_Plan(len(plan.row_starts) - 1, *(one.data_ptr() for one in moves))),
        (ctypes.c_int64 * len(sizes))(*sizes),
        (ctypes.c_void_p * len(wide))(*(None if one is None else one.data_ptr() for one in wide)),
        *(ctypes.c_void_p(one.data_ptr()) for one in written),
    )
