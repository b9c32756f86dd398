"""A drafting module of a public checkpoint: its shape and its tensors. Passes for serving compute with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.model.public_shapes import PublicShape, RopeShape


@dataclass(frozen=True, slots=True, eq=False)
class PublicModule:
    """Tensors by the names of the shape, on the device and in the type that serving asked for."""

    shape: PublicShape
    tensors: Mapping[str, Tensor]

    def get(self, name: str) -> Tensor | None:
        """A tensor that only some modules of this shape have, such as a bias."""
        return self.tensors.get(name)

    def norm(self, name: str) -> Tensor | None:
        """The weight of a norm, float32, if modules of this shape have it."""
        found = self.get(f"{name}.weight")
        return None if found is None else found.float()


def rotary_steps(rope: RopeShape, head_width: int, device: torch.device) -> tuple[Tensor, float]:
    """The angle for one position of each pair of elements, float32 [head width / 2], and the factor on rotations."""
    if rope.kind == "default":
        steps = torch.arange(head_width // 2, dtype=torch.float32, device=device)
        return rope.theta ** (-2 * steps / head_width), 1.0
    # Importing this takes seconds where the model is not loaded.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, **dict(rope.parameters)}
    config = LlamaConfig(
        hidden_size=head_width,
        num_attention_heads=1,
        head_dim=head_width,
        max_position_embeddings=rope.most_positions,
        rope_parameters=parameters,
    )
    steps, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, device)
    return steps.float(), float(factor)
