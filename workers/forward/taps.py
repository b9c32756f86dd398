"""Taps: hidden states of chosen layers, which drafting methods read.

Tap `l` (0…L) is the residual stream after `l` decoder layers. Tap 0 is what enters layer 0, and tap L is what the last
layer returns, before the final norm, if there is one. Hidden states are bfloat16 `[tokens, taps * hidden]`, with the
taps of a token in the order in which they were asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from cluster.core.errors import ConfigurationError
from workers.forward.layer_lists import decoder_layers


def check_taps(taps: Sequence[int], layers: int) -> None:
    """Raise `ConfigurationError` unless a model of `layers` layers has these taps."""
    wrong = [tap for tap in taps if not 0 <= tap <= layers]
    if wrong:
        raise ConfigurationError(
            f"taps: {wrong[0]} is refused; it must be between 0 and {layers}, the number of the model's layers"
        )


class TapRecorder:
    """The hidden states of one pass through a model's modules."""

    def __init__(self, taps: Sequence[int]) -> None:
        self._taps = tuple(taps)
        self._found: dict[int, torch.Tensor] = {}

    @contextmanager
    def recording(self, module: nn.Module) -> Iterator[None]:
        """Inside, each pass through the modules replaces what is recorded.

        Under tensor parallelism the residual stream is the same on every rank, so each rank records all of it.
        """
        from torch.distributed.tensor import DTensor  # a process without modules starts sooner

        layers = list(decoder_layers(module))

        def record(tap: int, values: torch.Tensor) -> None:
            whole = values.full_tensor() if isinstance(values, DTensor) else values
            self._found[tap] = whole.flatten(0, -2).bfloat16()

        with ExitStack() as stack:
            for tap in set(self._taps):
                if tap < len(layers):

                    def before(_: nn.Module, inputs: tuple[Any, ...], tap: int = tap) -> None:
                        record(tap, inputs[0])

                    handle = layers[tap].register_forward_pre_hook(before)
                else:

                    def after(_: nn.Module, __: tuple[Any, ...], output: Any, tap: int = tap) -> None:
                        record(tap, output if isinstance(output, torch.Tensor) else output[0])

                    handle = layers[-1].register_forward_hook(after)
                stack.callback(handle.remove)
            yield

    def hidden(self) -> torch.Tensor | None:
        """What the last pass showed, bfloat16 `[tokens, taps * hidden]`; `None` without taps. Call it once a pass."""
        found, self._found = self._found, {}
        return torch.cat([found[tap] for tap in self._taps], dim=1) if self._taps else None
