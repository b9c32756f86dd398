"""Fusion of a target's taps to one feature of each position: the first matrix of EAGLE-3, P-EAGLE, DFlash and DSpark.

A target applies it for drafters in other processes, so that one hidden size of a position is sent instead of one for
each tap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from cluster.core.drafting import Tap
from cluster.core.errors import ConfigurationError, ModelLoadError
from workers.model.draft_shapes import EagleShape
from workers.model.drafting.ends import rms_norm
from workers.model.drafting.public import PublicModule
from workers.model.formats.registry import read_draft, read_weights
from workers.model.fused_taps import fused_width
from workers.model.public_shapes import FeatureShape, MaskedBlockShape, PublicShape
from workers.transfer import onto


@dataclass(frozen=True, slots=True, eq=False)
class TapFusion:
    """Norms, one product over all taps of a position, and perhaps a norm of what it returns."""

    multiply: Callable[[Tensor], Tensor]
    """Maps float32 [tokens, taps x target's hidden size] to float32 [tokens, feature size]."""
    device: torch.device
    epsilon: float
    tap_norms: Tensor | None = None
    """Float32 [taps, target's hidden size]: each tap is normalised by its own RMS."""
    joint_norm: Tensor | None = None
    """Float32 [taps x target's hidden size]: all taps of a position are normalised together."""
    output_norm: Tensor | None = None
    """Float32 [feature size]."""

    def __call__(self, taps: Tensor) -> Tensor:
        """Features, float32 [tokens, feature size], of taps [tokens, taps, target's hidden size] on any device."""
        taps = onto(self.device, taps).float()
        if self.tap_norms is not None:
            taps = rms_norm(taps, self.tap_norms, self.epsilon)
        flat = taps.flatten(1)
        found = self.multiply(flat if self.joint_norm is None else rms_norm(flat, self.joint_norm, self.epsilon))
        return found if self.output_norm is None else rms_norm(found, self.output_norm, self.epsilon)


def public_fusion(module: PublicModule, multiply: Callable[[Tensor], Tensor]) -> TapFusion:
    """The fusion of a public module, whose product with the matrix `fc` is `multiply`.

    Raises `TypeError` for a module of a shape without one.
    """
    shape, device = module.shape, module.tensors["fc.weight"].device
    if isinstance(shape, MaskedBlockShape):
        return TapFusion(multiply, device, shape.body.norm_epsilon, output_norm=module.norm("hidden_norm"))
    if not isinstance(shape, FeatureShape) or not shape.taps:
        raise TypeError(f"{type(shape).__name__} without taps is no shape that fuses them")
    each = [found for number in range(shape.taps) if (found := module.norm(f"fc_norm.{number}")) is not None]
    tap_norms = torch.stack(each) if shape.tap_norm == "each" else None
    return TapFusion(multiply, device, shape.body.norm_epsilon, tap_norms, module.norm("input_norm"))


def load_fusion(directory: Path, taps: Sequence[Tap], device: torch.device) -> TapFusion:
    """Load the fusion of the draft in a directory, which reads these taps in this order.

    Its weights are float32 on a CPU, bfloat16 on a GPU. Raises `ModelLoadError`, and `ConfigurationError` for a draft
    without a fusion, or with another number of taps.
    """
    card = read_draft(directory, taps)
    if fused_width(card) is None:
        raise ConfigurationError(
            f"target.evidence.fusion: {str(directory)!r} is refused; it must hold a draft that fuses its taps"
        )
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tensors = read_weights(directory, card).tensors
    if isinstance(card.shape, PublicShape):
        module = PublicModule(card.shape, {name: value.to(device) for name, value in tensors.items() if _is_read(name)})
        return public_fusion(module, _product(module.tensors["fc.weight"].to(dtype), module.get("fc.bias")))
    if isinstance(card.shape, EagleShape):
        norm, weight = (tensors[f"fusion.{name}"].to(device) for name in ("norm", "proj.weight"))
        if len(norm) != len(taps):
            raise ModelLoadError(
                f"draft directory {str(directory)!r}: fusion.norm is for {len(norm)} taps, not {len(taps)}"
            )
        return TapFusion(_product(weight.to(dtype), None), device, card.shape.layer.norm_epsilon, norm.float())
    raise TypeError(f"{type(card.shape).__name__} is no shape that fuses taps")


def _is_read(name: str) -> bool:
    return name.startswith(("fc.", "fc_norm.", "input_norm.", "hidden_norm."))


def _product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    own_bias = None if bias is None else bias.to(weight.dtype)
    return lambda rows: linear(rows.to(weight.dtype), weight, own_bias).float()
