"""Forward passes of public draft checkpoints in plain torch, written from what is published of each format.

They share no code with the product: neither names of layers, nor norms, nor rotary positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Body:
    """What the sizes of tensors do not tell of decoder layers."""

    heads: int = 4
    kv_heads: int = 2
    epsilon: float = 1e-5
    theta: float = 10000.0


def norm(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm."""
    return rows / torch.sqrt((rows * rows).mean(-1, keepdim=True) + epsilon) * weight


def turned(rows: Tensor, positions: Sequence[int], theta: float) -> Tensor:
    """Rotary positions of [tokens, heads, width]; an element's partner is half a width behind it."""
    pairs = rows.shape[-1] // 2
    angles = [[position / theta ** (pair / pairs) for pair in range(pairs)] for position in positions]
    cosine = torch.tensor([[math.cos(angle) for angle in one] for one in angles]).unsqueeze(1)
    sine = torch.tensor([[math.sin(angle) for angle in one] for one in angles]).unsqueeze(1)
    low, high = rows.chunk(2, dim=-1)
    return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1)


def attention(
    layer: Mapping[str, Tensor], inputs: Tensor, positions: Sequence[int], body: Body, mask: Tensor | None = None
) -> Tensor:
    """Attention of [tokens, inputs] over these tokens themselves: causal, or where `mask` [tokens, tokens] is true."""

    def projected(part: str, heads: int) -> Tensor:
        found = inputs @ layer[f"self_attn.{part}_proj.weight"].T
        found = found + layer.get(f"self_attn.{part}_proj.bias", torch.zeros(1))
        found = found.view(len(inputs), heads, -1)
        if f"self_attn.{part}_norm.weight" in layer:
            found = norm(found, layer[f"self_attn.{part}_norm.weight"], body.epsilon)
        return found

    queries = turned(projected("q", body.heads), positions, body.theta)
    keys = turned(projected("k", body.kv_heads), positions, body.theta)
    values = projected("v", body.kv_heads)
    seen = torch.ones(len(inputs), len(inputs)).tril().bool() if mask is None else mask
    heads = []
    for head in range(body.heads):
        own = head // (body.heads // body.kv_heads)
        scores = queries[:, head] @ keys[:, own].T / math.sqrt(queries.shape[-1])
        heads.append(scores.masked_fill(~seen, -math.inf).softmax(-1) @ values[:, own])
    found = torch.cat(heads, dim=-1) @ layer["self_attn.o_proj.weight"].T
    return found + layer.get("self_attn.o_proj.bias", torch.zeros(1))


def mlp(layer: Mapping[str, Tensor], rows: Tensor, body: Body) -> Tensor:
    """The residual stream after the second half of a layer."""
    return rows + feed(layer, norm(rows, layer["post_attention_layernorm.weight"], body.epsilon))


def feed(layer: Mapping[str, Tensor], rows: Tensor) -> Tensor:
    """The MLP of normalised rows."""
    gate = rows @ layer["mlp.gate_proj.weight"].T
    hidden = gate * torch.sigmoid(gate) * (rows @ layer["mlp.up_proj.weight"].T)
    return hidden @ layer["mlp.down_proj.weight"].T


def part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, without the prefix."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Eagle3:
    """EAGLE-3 (Li et al. 2025): `x = [norm(e), norm(g)]` enters the first attention, `g` is the residual stream."""

    tensors: Mapping[str, Tensor]
    embedding: Tensor
    first: str = "midlayer."
    body: Body = Body()
    layers: int = 1
    norm_before_residual: bool = False
    norm_output: bool = False
    tap_norms: Sequence[str] = ()
    joint_norm: bool = False

    def features(self, states: Sequence[Tensor]) -> Tensor:
        """The features of hidden states, each [tokens, hidden size]."""
        if self.tap_norms:
            named = zip(states, self.tap_norms, strict=True)
            states = [norm(one, self.tensors[f"{name}.weight"], self.body.epsilon) for one, name in named]
        joined = torch.cat(list(states), dim=-1)
        if self.joint_norm:
            joined = norm(joined, self.tensors["input_norm.weight"], self.body.epsilon)
        return joined @ self.tensors["fc.weight"].T

    def outputs(self, features: Tensor, following: Sequence[int]) -> Tensor:
        """What the head feeds back, [tokens, hidden size], from features and the tokens after them."""
        first, epsilon = part(self.tensors, self.first), self.body.epsilon
        tokens = norm(self.embedding[list(following)], first["input_layernorm.weight"], epsilon)
        normed = norm(features, first["hidden_norm.weight"], epsilon)
        positions = range(len(following))
        rows = normed if self.norm_before_residual else features
        rows = rows + attention(first, torch.cat([tokens, normed], -1), positions, self.body)
        rows = mlp(first, rows, self.body)
        for number in range(1, self.layers):
            layer = part(self.tensors, f"layers.{number}.")
            inputs = norm(rows, layer["input_layernorm.weight"], epsilon)
            rows = mlp(layer, rows + attention(layer, inputs, positions, self.body), self.body)
        return norm(rows, self.tensors["norm.weight"], epsilon) if self.norm_output else rows

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits over the draft vocabulary."""
        if not self.norm_output:
            outputs = norm(outputs, self.tensors["norm.weight"], self.body.epsilon)
        return outputs @ self.tensors["lm_head.weight"].T

    def changed(self, **fields: object) -> Eagle3:
        """Another reading of the same checkpoint."""
        return replace(self, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Eagle1:
    """EAGLE-1 (Li et al. 2024): `fc [e, f]` is the input of one layer without a norm before its attention."""

    tensors: Mapping[str, Tensor]
    embedding: Tensor
    head: Tensor
    body: Body = Body()
    is_feature_first: bool = False

    def features(self, states: Sequence[Tensor]) -> Tensor:
        """The features: the target's last hidden state after its final norm."""
        (found,) = states
        return found

    def outputs(self, features: Tensor, following: Sequence[int]) -> Tensor:
        """What the head feeds back, [tokens, hidden size], from features and the tokens after them."""
        layer, tokens = part(self.tensors, "layers.0."), self.embedding[list(following)]
        joined = torch.cat([features, tokens] if self.is_feature_first else [tokens, features], -1)
        rows = joined @ self.tensors["fc.weight"].T + self.tensors.get("fc.bias", torch.zeros(1))
        return mlp(layer, rows + attention(layer, rows, range(len(following)), self.body), self.body)

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits over the target's vocabulary, by the target's head."""
        return outputs @ self.head.T

    def changed(self, **fields: object) -> Eagle1:
        """Another reading of the same checkpoint."""
        return replace(self, **fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class MaskedBlock:
    """DFlash (Chen et al. 2026) and DSpark: the last token and mask tokens attend to each other and to fused taps."""

    tensors: Mapping[str, Tensor]
    embedding: Tensor
    head: Tensor
    mask: Tensor
    """The embedding of the mask token."""
    slots: int = 4
    predicts_next: bool = False
    markov: str = "none"
    is_causal: bool = False
    convolved: int = 0
    """Channels of a group of DFlash2's convolutions; 0 without them."""
    candidates: int = 0
    """Candidates that DFlash2's selector ranks."""
    scale: float = 1.0
    cap: float = 0.0
    body: Body = Body()

    def hidden(self, states: Sequence[Tensor], last: int) -> Tensor:
        """The vectors of the slots that predict, from hidden states before the last token, [tokens, hidden size]."""
        epsilon = self.body.epsilon
        context = torch.cat(list(states), dim=-1) @ self.tensors["fc.weight"].T
        context = norm(context, self.tensors["hidden_norm.weight"], epsilon)
        known = len(context)
        seen = torch.ones(known + self.slots, known + self.slots).bool()
        if self.is_causal:
            seen = seen.tril()
        rows = self.scale * torch.stack([self.embedding[last], *[self.mask] * (self.slots - 1)])
        for number in range(2):
            layer = part(self.tensors, f"layers.{number}.")
            inputs = norm(rows, layer["input_layernorm.weight"], epsilon)
            inputs, kernels = self._convolved_before(part(layer, "attention_conv."), inputs)
            inputs = torch.cat([context, inputs])
            found = attention(layer, inputs, range(known + self.slots), self.body, seen)[known:]
            rows = rows + self._convolved_after(part(layer, "attention_conv."), found, kernels)
            inputs = norm(rows, layer["post_attention_layernorm.weight"], epsilon)
            inputs, kernels = self._convolved_before(part(layer, "mlp_conv."), inputs)
            rows = rows + self._convolved_after(part(layer, "mlp_conv."), feed(layer, inputs), kernels)
        found = norm(rows, self.tensors["norm.weight"], epsilon)
        return found if self.predicts_next else found[1:]

    def logits(self, hidden: Tensor, path: Sequence[int]) -> Tensor:
        """Logits [draft vocabulary] of the slot after `path`, which begins with the last token."""
        depth = len(path) - 1
        found = hidden[depth] @ self.tensors.get("lm_head.weight", self.head).T
        found = self.cap * torch.tanh(found / self.cap) if self.cap else found
        if self.candidates:
            return self._selected(found, hidden[depth], path[-1])
        return found if self.markov == "none" else found + self._bias(hidden, path)

    def confidence(self, hidden: Tensor, path: Sequence[int]) -> float | None:
        """The probability that the slot's token is accepted, by the confidence head."""
        weight = self.tensors.get("confidence_head.proj.weight")
        if weight is None:
            return None
        inputs = hidden[len(path) - 1]
        if weight.shape[1] > len(inputs):
            inputs = torch.cat([inputs, self.tensors["markov_head.markov_w1.weight"][path[-1]]])
        return float(torch.sigmoid(weight[0] @ inputs + self.tensors["confidence_head.proj.bias"][0]))

    def changed(self, **fields: object) -> MaskedBlock:
        """Another reading of the same checkpoint."""
        return replace(self, **fields)  # type: ignore[arg-type]

    def _selected(self, logits: Tensor, hidden: Tensor, before: int) -> Tensor:
        tensors = part(self.tensors, "candidate_selector.")
        context = tensors["predecessor_codebook"][before] * (tensors["hidden_projection.weight"] @ hidden)
        found = torch.full_like(logits, -math.inf)
        for token in logits.topk(self.candidates).indices.tolist():
            found[token] = logits[token] + context @ tensors["successor_codebook"][token]
        return found

    def _convolved_before(self, conv: Mapping[str, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        if not self.convolved:
            return rows, rows
        width = conv["base_kernel"].shape[1]
        kernels = (rows @ conv["kernel_projection.weight"].T).view(len(rows), 2, width, -1)
        return self._convolved(rows, conv["base_kernel"][0], kernels[:, 0]), kernels[:, 1]

    def _convolved_after(self, conv: Mapping[str, Tensor], rows: Tensor, kernels: Tensor) -> Tensor:
        return self._convolved(rows, conv["base_kernel"][1], kernels) if self.convolved else rows

    def _convolved(self, rows: Tensor, base: Tensor, kernels: Tensor) -> Tensor:
        found = torch.zeros_like(rows)
        for slot in range(len(rows)):
            for back in range(min(len(base), slot + 1)):
                kernel = base[back] + kernels[slot, back].repeat_interleave(self.convolved)
                found[slot] += kernel * rows[slot - back]
        return found

    def _bias(self, hidden: Tensor, path: Sequence[int]) -> Tensor:
        tensors = part(self.tensors, "markov_head.")
        first, second = tensors["markov_w1.weight"], tensors["markov_w2.weight"]
        before = first[path[-1]]
        if self.markov == "vanilla":
            return second @ before
        if self.markov == "gated":
            joined = torch.cat([hidden[len(path) - 1], before])
            return second @ (torch.sigmoid(tensors["gate_proj.weight"] @ joined + tensors["gate_proj.bias"]) * before)
        state = output = torch.zeros_like(before)
        for slot, token in enumerate(path):
            joined = torch.cat([state, first[token], hidden[slot]])
            gate, candidate, output = (tensors["joint_proj.weight"] @ joined + tensors["joint_proj.bias"]).chunk(3)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(candidate)
        return second @ torch.tanh(output)
