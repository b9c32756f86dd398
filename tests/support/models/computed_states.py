"""A target that computes the hidden states of texts when they are read, as if they had been stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workers.distill.answers import Answer
from workers.distill.stored_target import StoredTarget


class ComputedStates:
    """The taps and the last layer's output of texts, in the type of a target. It is a `TapSource`."""

    def __init__(self, target: PreTrainedModel, taps: Sequence[int]) -> None:
        self._target = target
        self._taps = tuple(taps)
        self.width = (len(self._taps) + 1) * int(target.config.hidden_size)

    def has(self, _: Answer) -> bool:
        return True

    def of(self, answer: Answer) -> Tensor:
        last: list[Tensor] = []
        hook = self._target.get_decoder().norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
        try:
            with torch.inference_mode():
                tokens = torch.tensor([[*answer.prompt, *answer.answer]])
                found = self._target.base_model(input_ids=tokens, use_cache=False, output_hidden_states=True)
        finally:
            hook.remove()
        return torch.cat([*(found.hidden_states[tap] for tap in self._taps), *last], dim=-1)[0]


def computed_target(target: PreTrainedModel, taps: Sequence[int]) -> StoredTarget:
    """The target with the states of all texts. The taps are those of all its layers but the last one."""
    return StoredTarget(target, ComputedStates(target, taps))
