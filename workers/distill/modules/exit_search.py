"""Finds the layers of a target with which it can draft for itself, by measured agreement (Zhang et al. 2024).

Two families are measured on held-out text: the first L layers, and all layers without those whose removal alone lowers
the agreement least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer
from workers.distill.budget import StepTimes
from workers.distill.modules.tap_cache import decoder_layers

_MOST_DEPTHS = 8
_MOST_ANSWERS = 8
"""Answers that candidates are measured on."""

Report = Callable[[float, str], None]
"""Called with the finished share and the best layers so far."""


@dataclass(frozen=True, slots=True)
class ExitCandidate:
    """Layers that draft, and how well they do."""

    layers: tuple[int, ...]
    agreement: float
    """Share of positions at which they and all layers rank the same token first."""
    speedup: float
    """Estimated tokens in the time of one plain step of the target, at the best length of a chain."""


def search_exit(
    target: Any, answers: Sequence[Answer], max_length: int, report: Report, ends: float | None = None
) -> list[ExitCandidate]:
    """Measure the candidates on a few answers until `ends` (of `time.monotonic`). Best first by estimated speedup.

    `target` is a `transformers` model. Answers to prompts of `max_length` tokens or more are left out. Raises
    `ConfigurationError` without answers or if no candidate was measured.
    """
    answers = [answer for answer in answers if len(answer.prompt) < max_length][:_MOST_ANSWERS]
    if not answers:
        raise ConfigurationError(f"--search: needed a held-out answer within --max-length, {max_length}, found none")
    count = len(decoder_layers(target))
    rows = [(*answer.prompt, *answer.answer)[:max_length] for answer in answers]
    firsts = [len(answer.prompt) - 1 for answer in answers]
    wanted = _choices(target, rows, firsts)
    found: list[ExitCandidate] = []
    total, times = count + 2 * max(0, count - 2), StepTimes()

    def measured(layers: tuple[int, ...]) -> float:
        with times.one(), only_layers(target, layers):
            chosen = _choices(target, rows, firsts)
        agreement = float((chosen == wanted).float().mean())
        found.append(ExitCandidate(layers, agreement, _speedup(agreement, len(layers) / count)))
        best = max(found, key=lambda each: each.speedup)
        report(len(found) / total, f"best {len(best.layers)} of {count} layers, agreement {best.agreement:.1%}")
        return agreement

    everything = tuple(range(count))
    without: dict[int, float] = {}
    for layer in everything:
        if times.one_fits(ends):
            without[layer] = measured(tuple(each for each in everything if each != layer))
    order = sorted(without, key=without.__getitem__, reverse=True)  # what matters least comes first
    for number in range(2, count):
        if times.one_fits(ends) and number <= len(order):
            skipped = set(order[:number])
            measured(tuple(each for each in everything if each not in skipped))
        if times.one_fits(ends):
            measured(everything[:number])
    if not found:
        raise ConfigurationError("--search: no candidate was measured in the time; needed more minutes")
    return sorted(found, key=lambda each: each.speedup, reverse=True)


@contextmanager
def only_layers(target: Any, layers: Sequence[int]) -> Iterator[None]:
    """Inside, the target runs these layers alone, in order; the others leave the residual stream as it is."""
    stack = decoder_layers(target)
    hooks = [stack[place].register_forward_hook(_pass_by) for place in range(len(stack)) if place not in set(layers)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _pass_by(_: nn.Module, inputs: Any, output: Any) -> Any:
    return (inputs[0], *output[1:]) if isinstance(output, tuple) else inputs[0]


def _choices(target: Any, rows: Sequence[Sequence[int]], firsts: Sequence[int]) -> Tensor:
    """The most probable token after each position from `firsts` on."""
    device = target.get_output_embeddings().weight.device
    found = []
    with torch.inference_mode():
        for row, first in zip(rows, firsts, strict=True):
            states = target.base_model(input_ids=torch.tensor([row]).to(device), use_cache=False).last_hidden_state
            found.append(target.get_output_embeddings()(states[0, first:-1]).argmax(dim=-1))
    return torch.cat(found)


def _speedup(agreement: float, cost: float) -> float:
    """Expected tokens in the time of one plain step of the target, at the best length of a chain."""
    best = 0.0
    for depth in range(1, _MOST_DEPTHS + 1):
        tokens = sum(agreement**place for place in range(depth + 1))
        best = max(best, tokens / (1 + depth * cost))
    return best
