"""The decoder layers of a public draft checkpoint for serving.

They differ from `LayerStack` in what public bodies have besides: biases, normalised queries and keys, scaled rotary
positions, a first layer whose attention reads a wider input than the residual stream, and convolutions. On a CPU all
layers without convolutions are one call of the kernels. Elsewhere torch computes them, with packed products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.draft.common.modules.layer_stack import RotaryTable, Rotation
from workers.draft.common.modules.module_settings import Weights
from workers.draft.common.modules.product import Product, make_product, stored_type
from workers.draft.common.modules.stream_operations import StreamOperations, operations_on
from workers.forward.native.window_layers import (
    LayerWeights,
    WindowLayers,
    WindowPiece,
    WindowShape,
    pack_window_layers,
)
from workers.forward.window_attention import WindowAttention, WindowHeads, WindowStep
from workers.model.drafting.ends import rms_norm
from workers.model.drafting.public import PublicModule, rotary_steps
from workers.model.public_shapes import ConvolutionShape, DecoderShape, MaskedBlockShape


class BiasedProduct:
    """The product with a matrix of a module, and its bias if it has one."""

    def __init__(self, module: PublicModule, names: Sequence[str], weights: Weights, directory: str | None) -> None:
        """The rows of all named matrices are one product. `directory` keeps the compiled CPU kernels."""
        weight, self._bias = _joined(module, names)
        self._multiply: Product = make_product(weight, weights, directory)

    def __call__(self, rows: Tensor) -> Tensor:
        """Map float32 [rows, inputs] to float32 [rows, outputs]."""
        found = self._multiply(rows)
        return found if self._bias is None else found + self._bias


class DecoderStack:
    """All layers of a module."""

    def __init__(self, module: PublicModule, body: DecoderShape, weights: Weights, directory: str | None) -> None:
        """`directory` keeps the compiled CPU kernels. A module with convolutions runs over whole blocks."""
        self.windows: WindowAttention | None = None
        """What attends where the CPU kernels do not compute the layers."""
        self._packed = _packed(module, body, weights, directory) if is_one_call(module) else None
        if self._packed is not None:
            return
        device = _device_of(module)
        self._rotary = RotaryTable(body.rope, body.head_width, device)
        self._layers = [_Layer(module, body, number, weights, directory) for number in range(body.layers)]
        self._operations = operations_on(device, body.hidden_size, body.intermediate_size)
        self._epsilon = body.norm_epsilon
        heads = WindowHeads(body.heads, body.kv_heads, body.head_width, body.head_width)
        self.windows = WindowAttention(heads, device)

    def run(
        self,
        residual: Tensor,
        positions: Sequence[int],
        pieces: Sequence[WindowPiece],
        first_inputs: Tensor | None = None,
    ) -> Tensor:
        """Write the keys and values of all pieces; return the residual stream after the layers.

        `residual` is the stream before them, float32 [tokens, hidden size]: all pieces' tokens, one after another, at
        `positions`. `first_inputs` [tokens, inputs] are what the first layer's attention reads in place of the
        normalised stream. No two pieces share slots.
        """
        if self._packed is not None:
            return self._packed.run(residual, positions, pieces, first_inputs)
        if self.windows is None:
            raise TypeError("layers without packed weights have no attention")
        return self.computed(residual, self.windows.plan(pieces, positions), first_inputs)

    def computed(self, residual: Tensor, step: WindowStep, first_inputs: Tensor | None = None) -> Tensor:
        """What `run` returns, by torch, with attention that is planned already."""
        rotation, operations = self._rotary.at(step.positions), self._operations
        residual = residual.contiguous()
        added: Tensor | None = None  # to the stream, by the last layer
        for number, layer in enumerate(self._layers):
            if added is not None and layer.input_norm is not None:
                residual, inputs = operations.add_and_normalize(residual, added, layer.input_norm, self._epsilon)
            else:
                residual = residual if added is None else residual + added
                inputs = residual
                if layer.input_norm is not None:
                    inputs = operations.normalize(residual, layer.input_norm, self._epsilon)
            if number == 0 and first_inputs is not None:
                inputs = first_inputs
            kernels = None
            if layer.convolution is not None:
                inputs, kernels = layer.convolution.before(inputs)
            attended = layer.attended(step.attend(number, *layer.project(inputs, rotation)), kernels)
            residual, inputs = operations.add_and_normalize(residual, attended, layer.post_norm, self._epsilon)
            added = layer.mlp(inputs, operations)
        return residual if added is None else residual + added


def is_one_call(module: PublicModule) -> bool:
    """Whether the CPU kernels have all parts of a module's layers, and its weights are where they compute."""
    return _device_of(module).type == "cpu" and _convolution_of(module) is None


def _packed(module: PublicModule, body: DecoderShape, weights: Weights, directory: str | None) -> WindowLayers | None:
    steps, factor = rotary_steps(body.rope, body.head_width, torch.device("cpu"))
    shape = WindowShape(body.heads, body.kv_heads, body.head_width, body.norm_epsilon, steps, factor)
    layers = [_weights_of(module, f"layers.{number}") for number in range(body.layers)]
    return pack_window_layers(layers, shape, stored_type(weights, directory), directory)


def _weights_of(module: PublicModule, name: str) -> LayerWeights:
    qkv, qkv_bias = _joined(module, [f"{name}.self_attn.{part}_proj" for part in "qkv"])
    out, out_bias = _joined(module, [f"{name}.self_attn.o_proj"])
    gate, up, down = (module.tensors[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return LayerWeights(
        *(qkv, out, gate, up, down),
        input_norm=module.norm(f"{name}.input_layernorm"),
        post_norm=module.tensors[f"{name}.post_attention_layernorm.weight"],
        query_norm=module.norm(f"{name}.self_attn.q_norm"),
        key_norm=module.norm(f"{name}.self_attn.k_norm"),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
    )


def _joined(module: PublicModule, names: Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """The rows of all named matrices one after another, and their biases, float32, if they have some."""
    weights = [module.tensors[f"{name}.weight"] for name in names]
    biases = [bias for name in names if (bias := module.get(f"{name}.bias")) is not None]
    return torch.cat(weights), torch.cat(biases).float() if biases else None


def _device_of(module: PublicModule) -> torch.device:
    return next(iter(module.tensors.values())).device


def _convolution_of(module: PublicModule) -> ConvolutionShape | None:
    return module.shape.convolution if isinstance(module.shape, MaskedBlockShape) else None


class BlockConvolution:
    """DFlash2's two convolutions around one sub-layer, over its input and its output. No block reads another one."""

    def __init__(
        self,
        module: PublicModule,
        name: str,
        shape: ConvolutionShape,
        slots: int,
        *,
        weights: Weights,
        directory: str | None = None,
    ) -> None:
        """`name` is that of the tensors; blocks have `slots` tokens. `directory` keeps the compiled CPU kernels."""
        self._shape, self._slots = shape, slots
        self._project = make_product(module.tensors[f"{name}.kernel_projection.weight"], weights, directory)
        base = module.tensors[f"{name}.base_kernel"].float()
        self._base = base.view(2, shape.width, -1, shape.group)  # [sides, width, groups, channels]

    def before(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The convolved inputs [tokens, hidden size] of the sub-layer, and the kernels for `after`.

        `inputs`, float32 [tokens, hidden size], are normalised, and those of whole blocks.
        """
        kernels = self._project(inputs).view(len(inputs), 2, self._shape.width, -1)
        return self._convolved(inputs, kernels[:, 0], 0), kernels[:, 1]

    def after(self, outputs: Tensor, kernels: Tensor) -> Tensor:
        """The convolved outputs [tokens, hidden size] of the sub-layer."""
        return self._convolved(outputs, kernels, 1)

    def _convolved(self, rows: Tensor, kernels: Tensor, side: int) -> Tensor:
        blocks = rows.view(-1, self._slots, *self._base.shape[2:])  # [blocks, slots, groups, channels]
        factors = kernels.reshape(-1, self._slots, *kernels.shape[1:]).unsqueeze(-1) + self._base[side]
        found = factors[:, :, 0] * blocks
        for back in range(1, self._shape.width):
            found[:, back:] += factors[:, back:, back] * blocks[:, :-back]
        return found.view_as(rows)


class _Layer:
    """One layer whose queries, keys and values come from one product."""

    def __init__(
        self, module: PublicModule, body: DecoderShape, number: int, weights: Weights, directory: str | None
    ) -> None:
        self._body = body
        name = f"layers.{number}"

        def product(*parts: str) -> BiasedProduct:
            return BiasedProduct(module, [f"{name}.{part}" for part in parts], weights, directory)

        self._joined = product("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._out, self._down = product("self_attn.o_proj"), product("mlp.down_proj")
        self._gate_up = product("mlp.gate_proj", "mlp.up_proj")
        norms = ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm")
        self.input_norm, self._query_norm, self._key_norm = (module.norm(f"{name}.{part}") for part in norms)
        self.post_norm = module.tensors[f"{name}.post_attention_layernorm.weight"].float()
        self.convolution, self._mlp_convolution = (
            _convolution(module, f"{name}.{part}_conv", weights, directory) for part in ("attention", "mlp")
        )

    def project(self, inputs: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [tokens, heads, head width], keys and values [tokens, KV heads, head width], rotated."""
        body = self._body
        joined = self._joined(inputs).view(len(inputs), -1, body.head_width)
        queries, keys, values = torch.split(joined, [body.heads, body.kv_heads, body.kv_heads], dim=1)
        if self._query_norm is not None:
            queries = rms_norm(queries, self._query_norm, body.norm_epsilon)
        if self._key_norm is not None:
            keys = rms_norm(keys, self._key_norm, body.norm_epsilon)
        return rotation.apply(queries), rotation.apply(keys), values

    def attended(self, heads: Tensor, kernels: Tensor | None = None) -> Tensor:
        """What attention adds to the stream [tokens, hidden size], of its heads [tokens, heads x head width].

        `kernels` are those that `convolution` returned for the inputs.
        """
        found = self._out(heads)
        if self.convolution is not None and kernels is not None:
            found = self.convolution.after(found, kernels)
        return found

    def mlp(self, inputs: Tensor, operations: StreamOperations) -> Tensor:
        """What the feed-forward network adds to the stream, of normalised inputs [tokens, hidden size]."""
        kernels = None
        if self._mlp_convolution is not None:
            inputs, kernels = self._mlp_convolution.before(inputs)
        gate, up = self._gate_up(inputs).chunk(2, dim=-1)
        found = self._down(operations.silu_mul(gate, up))
        return (
            found if self._mlp_convolution is None or kernels is None else self._mlp_convolution.after(found, kernels)
        )


def _convolution(module: PublicModule, name: str, weights: Weights, directory: str | None) -> BlockConvolution | None:
    shape, convolution = module.shape, _convolution_of(module)
    if convolution is None or not isinstance(shape, MaskedBlockShape):
        return None
    return BlockConvolution(module, name, convolution, shape.slots, weights=weights, directory=directory)
