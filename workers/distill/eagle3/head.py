"""A trainable EAGLE-3 head (Li et al. 2025): one Llama layer on the embedding and the feature side by side.

Its parameters have the names of `FeatureShape.tensors`, and it computes what `FeaturePass` computes from them. The
head has an output matrix of its own, `lm_head.weight`, for the tokens that it can propose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from cluster.core.errors import ConfigurationError
from workers.distill.parts import Mlp, Norm, Turn, attend, run_layer
from workers.distill.peers import whole
from workers.model.drafting.public import rotary_steps
from workers.model.formats.registry import DraftWeights
from workers.model.public_shapes import FeatureShape

Context = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of earlier passes over the same rows, each [rows, tokens, KV heads, head width]."""

LM_HEAD = "lm_head.weight"


class _Attention(nn.Module):
    def __init__(self, shape: FeatureShape) -> None:
        super().__init__()
        body = shape.body
        self._body = body
        queries, keys = body.heads * body.head_width, body.kv_heads * body.head_width
        self.q_proj = nn.Linear(2 * body.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * body.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * body.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, body.hidden_size, bias=False)

    def forward(self, inputs: Tensor, turn: Turn, context: Context, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        body = self._body
        split = (*inputs.shape[:-1], -1, body.head_width)
        values = self.v_proj(inputs).view(split)
        queries = turn(self.q_proj(inputs).view(split)).to(values.dtype)
        keys = turn(self.k_proj(inputs).view(split)).to(values.dtype)
        groups = body.heads // body.kv_heads
        # Each head with keys of its own: with a mask, no fused kernel of CUDA groups queries.
        all_keys, all_values = (
            torch.cat([*(pair[part] for pair in context), own], dim=1).transpose(1, 2).repeat_interleave(groups, dim=1)
            for part, own in enumerate((keys, values))
        )
        found = attend(queries.transpose(1, 2), all_keys, all_values, mask)
        return self.o_proj(found.transpose(1, 2).flatten(-2)), keys, values


class _Layer(nn.Module):
    def __init__(self, shape: FeatureShape) -> None:
        super().__init__()
        size = shape.body.hidden_size
        self.self_attn = _Attention(shape)
        self.post_attention_layernorm = Norm(size, shape.body.norm_epsilon)
        self.mlp = Mlp(size, shape.body.intermediate_size)


class Eagle3Head(nn.Module):
    """The parameters of a head, and its pass over whole rows of text."""

    def __init__(self, shape: FeatureShape, rows: int) -> None:
        """`rows` is the number of tokens that it can propose. Raises `ConfigurationError` for another shape."""
        super().__init__()
        body = shape.body
        if not shape.is_trainable:
            raise ConfigurationError(f"shape: {shape} is refused; it must be an EAGLE-3 head of one Llama layer")
        self.shape = shape
        size, epsilon = body.hidden_size, body.norm_epsilon
        if shape.tap_norm == "each":
            self.fc_norm = nn.ModuleList(Norm(shape.target_hidden_size, epsilon) for _ in range(shape.taps))
        if shape.tap_norm == "joint":
            self.input_norm = Norm(shape.taps * shape.target_hidden_size, epsilon)
        self.fc = nn.Linear(shape.taps * shape.target_hidden_size, size, bias=False)
        self.embedding_norm, self.feature_norm = Norm(size, epsilon), Norm(size, epsilon)
        self.layers = nn.ModuleList([_Layer(shape)])
        self.norm = Norm(size, epsilon)
        self.lm_head = nn.Linear(size, rows, bias=False)

    def features(self, taps: Tensor) -> Tensor:
        """Features [..., hidden size] of taps [..., taps x target's hidden size]."""
        if self.shape.tap_norm == "each":
            parts = taps.chunk(self.shape.taps, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        if self.shape.tap_norm == "joint":
            taps = self.input_norm(taps)
        found: Tensor = self.fc(taps.to(self.fc.weight.dtype))
        return found

    def forward(
        self,
        taps: Tensor,
        following: Tensor,
        depths: int,
        *,
        places: Tensor | None = None,
        recomputes: bool = False,
    ) -> list[Tensor]:
        """The outputs [rows, tokens, hidden size] of each depth of a roll-out.

        This is EAGLE-3's training-time test: a head drafts several steps from its own outputs, all rows at once. The
        input at position i is the feature of i and the embedding of the token at i + 1; the output predicts the token
        at i + 2. At depth d, the feature is the head's own output of depth d - 1 at i - 1 (EAGLE-3.1: the normalised
        output, where `feeds_normed` says so). The input then attends to
        the target's features up to i - d, and after them to one position of each earlier depth: what it would have
        drafted itself.

        `taps` [rows, tokens, taps x target's hidden size] are the target's at the first positions of each row,
        `following` [rows, tokens, hidden size] embeddings of the tokens after them. Outputs of depth d at positions
        below d of a text are of no use. `places` [rows, tokens] are the positions within their own texts, where a row
        has several; none attends to another text. With `recomputes`, the backward pass computes the activations of
        each depth again.
        """
        features = self.features(taps)
        index = torch.arange(features.shape[1], device=features.device)
        body = self.shape.body
        turn = Turn(index if places is None else places, *rotary_steps(body.rope, body.head_width, features.device))
        behind = index.unsqueeze(1) - index  # [tokens, tokens] How far a position is before another one.
        is_same: Tensor | None = None
        if places is not None:
            begins = index - places
            is_same = (begins.unsqueeze(2) == begins.unsqueeze(1)).unsqueeze(1)  # [rows, 1, tokens, tokens]
        context: list[tuple[Tensor, Tensor]] = []
        outputs: list[Tensor] = []
        for depth in range(depths):
            parts = [behind >= depth, *(behind == depth - earlier for earlier in range(1, depth + 1))]
            mask = torch.cat(parts if is_same is None else [part & is_same for part in parts], dim=-1)
            # The context of this depth: what is computed again must not see later ones.
            seen = tuple(context)
            output, keys, values = run_layer(self._step, features, following, turn, seen, mask, recomputes=recomputes)
            context.append((keys, values))
            outputs.append(output)
            fed = self.norm(output) if self.shape.feeds_normed else output
            features = torch.cat([fed[:, :1], fed[:, :-1]], dim=1)
        return outputs

    def _step(
        self, features: Tensor, following: Tensor, turn: Turn, context: Context, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs [rows, tokens, hidden size], and the keys and values of this pass.

        `features` and `following` [rows, tokens, hidden size] are features at the positions that `turn` rotates by, and
        embeddings of the tokens one position later. `mask`, bool and broadcast to [rows, heads, tokens, context +
        tokens], is true where a token attends to. An output is the feature of the next position.
        """
        features = features.float()
        normed = self.feature_norm(features)
        residual = normed if self.shape.keeps_normed_residual else features
        layer = self.layers[0]
        if not isinstance(layer, _Layer):
            raise TypeError(f"layers: {type(layer).__name__} is refused; it must be _Layer")
        inputs = torch.cat([self.embedding_norm(following), normed], dim=-1)
        attended, keys, values = layer.self_attn(inputs, turn, context, mask)
        residual = residual + attended
        return residual + layer.mlp(layer.post_attention_layernorm(residual)), keys, values

    def weights(self, vocabulary: Tensor) -> DraftWeights:
        """What is stored of the head. `vocabulary` [draft vocabulary] are the tokens of its rows, ascending.

        All processes that share a head have to call it.
        """
        tensors = whole(self.state_dict())
        head = tensors.pop(LM_HEAD)
        return DraftWeights(tensors, vocabulary, head=head)

    def logits(self, outputs: Tensor) -> Tensor:
        """Logits [..., draft vocabulary] of outputs [..., hidden size]."""
        found: Tensor = self.lm_head(self.norm(outputs))
        return found

    def start(self, layer: Mapping[str, Tensor], norm: Tensor, head: Tensor) -> None:
        """Begin as a decoder layer of the target that sees the highest tap, with the target's norm and head.

        `layer` are the parameters of the layer by their names in Llama; those of another size stay random. `norm`
        [hidden size] and `head` [draft vocabulary, hidden size] are the target's.
        """
        size, own = self.shape.body.hidden_size, self.state_dict()
        with torch.no_grad():
            for name, value in layer.items():
                goal = own.get(f"layers.0.{name}")
                if goal is None:
                    continue
                if goal.dim() == 2 and goal.shape[1] == 2 * size and value.shape == goal[:, size:].shape:
                    goal[:, size:].copy_(value)
                    goal[:, :size].mul_(0.1)
                elif goal.shape == value.shape:
                    goal.copy_(value)
            if "input_layernorm.weight" in layer:
                self.feature_norm.weight.copy_(layer["input_layernorm.weight"])
            self.norm.weight.copy_(norm)
            self.lm_head.weight.copy_(head)
            if self.shape.target_hidden_size == size:
                self.fc.weight.mul_(0.1)
                self.fc.weight[:, -size:].fill_diagonal_(1.0)
