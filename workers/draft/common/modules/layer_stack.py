"""The layers of a drafting module for serving, with packed products and merged projections.

On CPU all layers are one call of the kernels. Elsewhere torch computes them; vectors between products are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.draft.common.modules.module_settings import Weights
from workers.draft.common.modules.product import make_product, stored_type
from workers.draft.common.modules.stream_operations import StreamOperations, TorchOperations, operations_on
from workers.forward.native.packed_linear import InputNorm
from workers.forward.native.window_layers import LayerWeights, WindowPiece, WindowShape, pack_window_layers
from workers.forward.window_attention import WindowAttention, WindowHeads, WindowStep
from workers.model.drafting.layer import DrafterLayer
from workers.model.drafting.public import rotary_steps
from workers.model.public_shapes import RopeShape


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary positions of some tokens. Both are [tokens, 1, head width]; the first half of `sine` is negated."""

    cosine: Tensor
    sine: Tensor

    def apply(self, states: Tensor) -> Tensor:
        """Rotate [tokens, heads, head width], halves paired as in Llama."""
        return states * self.cosine + states.roll(states.shape[-1] // 2, dims=-1) * self.sine


class RotaryTable:
    """Computes rotations for positions, with the scaling of a model's rotary embedding."""

    def __init__(self, rope: RopeShape, head_width: int, device: torch.device) -> None:
        self._steps, self._factor = rotary_steps(rope, head_width, device)

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of positions, integers [tokens]."""
        angles = positions.to(torch.float32).unsqueeze(-1) * self._steps
        cosine, sine = angles.cos() * self._factor, angles.sin() * self._factor
        return Rotation(torch.cat([cosine, cosine], dim=-1).unsqueeze(1), torch.cat([-sine, sine], dim=-1).unsqueeze(1))


class LayerStack:
    """All layers of a module, each with the norm before its projections."""

    def __init__(
        self, layers: Sequence[DrafterLayer], input_norms: Tensor, weights: Weights, directory: str | None
    ) -> None:
        """`input_norms` [layers, hidden size] are the norms' weights. `directory` keeps the compiled CPU kernels."""
        shape = layers[0].shape
        rope = RopeShape(shape.rope_theta)
        steps, factor = rotary_steps(rope, shape.head_width, torch.device("cpu"))
        own = WindowShape(shape.heads, shape.kv_heads, shape.head_width, shape.norm_epsilon, steps, factor)
        given = [_weights_of(layer, norm) for layer, norm in zip(layers, input_norms, strict=True)]
        self._packed = pack_window_layers(given, own, stored_type(weights, directory), directory)
        self.windows: WindowAttention | None = None
        """What attends where the CPU kernels do not compute the layers."""
        if self._packed is None:
            device = layers[0].q_proj.weight.device
            self._rotary = RotaryTable(rope, shape.head_width, device)
            inner, hidden = given[0].gate.shape
            normalises = products_normalise(device)
            self._operations: StreamOperations = (
                _NormsInProducts() if normalises else operations_on(device, hidden, inner)
            )
            self._epsilon = own.epsilon
            self._layers = [
                _TorchLayer(one, norm, own, weights, normalises=normalises)
                for one, norm in zip(given, input_norms, strict=True)
            ]
            heads = WindowHeads(shape.heads, shape.kv_heads, shape.head_width, shape.head_width)
            self.windows = WindowAttention(heads, device)

    def run(self, residual: Tensor, positions: Sequence[int], pieces: Sequence[WindowPiece]) -> Tensor:
        """Write the keys and values of all pieces; return the residual stream after the layers.

        `residual` [tokens, hidden size] is float32. See `WindowLayers`.
        """
        if self._packed is not None:
            return self._packed.run(residual, positions, pieces)
        if self.windows is None:
            raise TypeError("layers without packed weights have no attention")
        return self.computed(residual, self.windows.plan(pieces, positions))

    def computed(self, residual: Tensor, step: WindowStep) -> Tensor:
        """What `run` returns, by torch, with attention that is planned already."""
        rotation, operations, epsilon = self._rotary.at(step.positions), self._operations, self._epsilon
        residual = residual.contiguous()
        first, *others = self._layers
        inputs = operations.normalize(residual, first.input_norm, epsilon)
        added = residual
        for number, (layer, following) in enumerate(zip(self._layers, [*others, None], strict=True)):
            attended = layer.attended(step.attend(number, *layer.project(inputs, rotation)))
            residual, inputs = operations.add_and_normalize(residual, attended, layer.post_norm, epsilon)
            added = layer.mlp(inputs, operations)
            if following is not None:
                residual, inputs = operations.add_and_normalize(residual, added, following.input_norm, epsilon)
        return residual + added


def products_normalise(device: torch.device) -> bool:
    """Whether products on this device normalise what they read: CPU kernels do so in the same call."""
    return device.type == "cpu"


class _NormsInProducts(TorchOperations):
    """The operations where the products of a CPU normalise what they read."""

    def normalize(self, rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:  # noqa: ARG002
        return rows

    def add_and_normalize(
        self,
        rows: Tensor,
        added: Tensor,
        weight: Tensor,  # noqa: ARG002
        epsilon: float,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        sums = rows + added
        return sums, sums


class _TorchLayer:
    """One layer whose queries, keys and values come from one product."""

    def __init__(
        self, layer: LayerWeights, input_norm: Tensor, shape: WindowShape, weights: Weights, *, normalises: bool
    ) -> None:
        """`normalises`: whether the products normalise what they read."""
        self._shape = shape
        size = len(input_norm)
        self.input_norm, self.post_norm = input_norm.detach().float(), layer.post_norm.detach().float()
        given = (input_norm, layer.post_norm)
        norms = [InputNorm(norm, shape.epsilon, size) if normalises else None for norm in given]
        self._joined = make_product(layer.qkv, weights, None, norms[0])
        self._out, self._down = make_product(layer.out, weights), make_product(layer.down, weights)
        self._gate_up = make_product(torch.cat([layer.gate, layer.up]), weights, None, norms[1])

    def project(self, inputs: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [tokens, heads, head width], keys and values [tokens, KV heads, head width], rotated."""
        heads, both = self._shape.heads, self._shape.heads + self._shape.kv_heads
        joined = self._joined(inputs).view(len(inputs), -1, self._shape.head_width)
        rotated = rotation.apply(joined[:, :both])
        return rotated[:, :heads], rotated[:, heads:], joined[:, both:]

    def attended(self, heads: Tensor) -> Tensor:
        """What attention adds to the stream [tokens, hidden size], of its heads [tokens, heads × head width]."""
        return self._out(heads)

    def mlp(self, inputs: Tensor, operations: StreamOperations) -> Tensor:
        """What the feed-forward network adds to the stream [tokens, hidden size]."""
        gate, up = self._gate_up(inputs).chunk(2, dim=-1)
        return self._down(operations.silu_mul(gate, up))


def _weights_of(layer: DrafterLayer, input_norm: Tensor) -> LayerWeights:
    return LayerWeights(
        torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]),
        *(layer.o_proj.weight, layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight),
        *(input_norm, layer.mlp_norm),
    )
