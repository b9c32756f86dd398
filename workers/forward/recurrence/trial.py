"""Compares a mixer with its module's own code, on tokens of two rows, one of them with a tree."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.forward.recurrence.mixers import Mixer
from workers.forward.recurrence.plan import RecurrencePlan, StateRow, plan_recurrence
from workers.kv.state_slots import LayerState, StateShape
from workers.kv.states import SequenceStates

_TREE = TokenTree((0, 1, 2, 3), (-1, 0, 0, -1))
_SLOTS = 7
_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Largest difference of a result from the module's, of its largest number."""

Compute = Callable[[torch.Tensor, LayerState, RecurrencePlan], torch.Tensor]
"""What `Mixer.compute` does."""


def difference(mixer: Mixer, own: Compute, shape: StateShape, hidden: torch.Tensor) -> str | None:
    """How the mixer differs from its module, computed by `own`; `None` if it does not.

    `hidden` `[1, tokens, hidden]` has any values of the module's type; it gives width, type and device.
    """
    draw = torch.Generator().manual_seed(0)
    outputs: list[torch.Tensor] = []
    states = [shape.slots(1 + _SLOTS, hidden.device) for _ in range(2)]
    for committed, slots, tree in ((0, [1, 2, 3, 4, 5], _TREE), (1, [6], EMPTY_TREE)):
        rows = (
            StateRow(2, EMPTY_TREE, SequenceStates(committed=committed, fresh=[7])),
            StateRow(3, tree, SequenceStates(committed=committed, fresh=slots)),
        )
        plan = plan_recurrence(rows, hidden.device)
        tokens = torch.randn((1, len(plan.moves), hidden.shape[-1]), generator=draw).to(hidden)
        outputs += [compute(tokens, of, plan) for compute, of in zip((mixer.compute, own), states, strict=True)]
    found = [(f"output {index // 2}", outputs[index], outputs[index + 1]) for index in (0, 2)]
    found += [(f"state {part}", mine, wanted) for part, (mine, wanted) in enumerate(zip(*states, strict=True))]
    for name, mine, wanted in found:
        gap, most = (mine.float() - wanted.float()).abs().max(), wanted.float().abs().max()
        if not bool(gap <= _BOUNDS.get(hidden.dtype, 0.0) * most):  # also for NaN
            return f"{name} differs by {float(gap):.2g} of {float(most):.2g}"
    return None
