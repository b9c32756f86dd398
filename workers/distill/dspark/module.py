"""A trainable DSpark drafter: what `MaskedBlockPass` and `MarkovRanker` compute, for many blocks of a text at once.

Its parameters have the names of `MaskedBlockShape.tensors`. Embedding and output head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cluster.core.errors import ConfigurationError
from workers.distill.parts import Mlp, Norm, Turn, attend, run_layer
from workers.distill.peers import whole
from workers.model.drafting.public import rotary_steps
from workers.model.formats.registry import DraftWeights
from workers.model.public_shapes import DecoderShape, MarkovShape, MaskedBlockShape

FIRST, SECOND = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
"""Parameters with a row for each token of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks in rows of text. An anchor is the last committed token of a text that ends there."""

    anchors: Tensor
    """[rows, blocks] int64: the position of each anchor in its row."""
    starts: Tensor
    """[rows, blocks] int64: where the text of each anchor begins in its row."""
    tokens: Tensor
    """[rows, blocks, slots] int64: the anchor and the text after it. A slot predicts the token after its own."""


class _Attention(nn.Module):
    def __init__(self, body: DecoderShape) -> None:
        super().__init__()
        self._body = body
        size, queries, keys = body.hidden_size, body.heads * body.head_width, body.kv_heads * body.head_width
        self.q_proj = nn.Linear(size, queries, bias=False)
        self.k_proj = nn.Linear(size, keys, bias=False)
        self.v_proj = nn.Linear(size, keys, bias=False)
        self.o_proj = nn.Linear(queries, size, bias=False)
        self.q_norm, self.k_norm = Norm(body.head_width, body.norm_epsilon), Norm(body.head_width, body.norm_epsilon)

    def forward(self, inputs: Tensor, context: Tensor, turns: tuple[Turn, Turn], mask: Tensor) -> Tensor:
        """`inputs` [rows, slots, hidden size] attend to `context` [rows, tokens, hidden size] and to themselves.

        `turns` are the rotations of slots and context. `mask` [rows, 1, slots, tokens + slots] is added to scores.
        """
        body = self._body

        def split(projected: Tensor) -> Tensor:
            return projected.view(*projected.shape[:2], -1, body.head_width)

        queries = turns[0](self.q_norm(split(self.q_proj(inputs))))
        keys = [turn(self.k_norm(split(self.k_proj(part)))) for part, turn in ((context, turns[1]), (inputs, turns[0]))]
        values = [split(self.v_proj(part)) for part in (context, inputs)]
        groups = body.heads // body.kv_heads
        # Each head with keys of its own: with a mask, no fused kernel of CUDA groups queries.
        all_keys, all_values = (
            torch.cat(parts, dim=1).transpose(1, 2).repeat_interleave(groups, dim=1).to(mask.dtype)
            for parts in (keys, values)
        )
        every = mask.expand(-1, body.heads, -1, -1)
        found = attend(queries.transpose(1, 2).to(mask.dtype), all_keys, all_values, every)
        output: Tensor = self.o_proj(found.transpose(1, 2).flatten(2))
        return output


class _Layer(nn.Module):
    def __init__(self, body: DecoderShape) -> None:
        super().__init__()
        self.input_layernorm = Norm(body.hidden_size, body.norm_epsilon)
        self.self_attn = _Attention(body)
        self.post_attention_layernorm = Norm(body.hidden_size, body.norm_epsilon)
        self.mlp = Mlp(body.hidden_size, body.intermediate_size)

    def forward(self, residual: Tensor, context: Tensor, turns: tuple[Turn, Turn], mask: Tensor) -> Tensor:
        residual = residual + self.self_attn(self.input_layernorm(residual), context, turns, mask)
        added: Tensor = self.mlp(self.post_attention_layernorm(residual))
        return residual + added


class _MarkovHead(nn.Module):
    """What the token before a slot adds to its logits, `second @ mixed`."""

    def __init__(self, shape: MarkovShape, hidden_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.markov_w1, self.markov_w2 = (
            nn.Embedding(shape.vocabulary, shape.rank),
            nn.Embedding(shape.rows, shape.rank),
        )
        if shape.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + shape.rank, shape.rank)
        if shape.kind == "rnn":
            self.joint_proj = nn.Linear(2 * shape.rank + hidden_size, 3 * shape.rank)

    def step(self, embedded: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """`mixed` [..., rank] of slots and their next state, from embeddings of the tokens before."""
        if self.shape.kind == "gated":
            return self.gate_proj(torch.cat([hidden, embedded], dim=-1)).sigmoid() * embedded, state
        if self.shape.kind == "rnn":
            gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1)).chunk(3, dim=-1)
            gate = gate.sigmoid()
            return output.tanh(), gate * state + (1.0 - gate) * candidate.tanh()
        return embedded, state


class SparkModule(nn.Module):
    """The parameters of a drafter, and its pass over blocks."""

    def __init__(self, shape: MaskedBlockShape, embedding: Tensor, tap_scale: Tensor) -> None:
        """`embedding` [vocabulary, hidden size] is the target's.

        `tap_scale` [taps x hidden size] is multiplied with the taps, so that all their elements are of one size; it is
        a part of `fc` where it is stored. Raises `ConfigurationError` for another shape.
        """
        super().__init__()
        self._steps: Tensor
        self._embedding: Tensor
        self._scale: Tensor
        body = shape.body
        if not shape.is_trainable or shape.markov is None:
            raise ConfigurationError(
                f"shape: {shape} is refused; it must be a DSpark drafter of Qwen3 layers with both of its heads"
            )
        self.shape, size = shape, body.hidden_size
        self.fc = nn.Linear(shape.taps * size, size, bias=False)
        self.hidden_norm, self.norm = Norm(size, body.norm_epsilon), Norm(size, body.norm_epsilon)
        self.layers = nn.ModuleList(_Layer(body) for _ in range(body.layers))
        self.markov_head = _MarkovHead(shape.markov, size)
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(size + shape.markov.rank, 1)})
        steps, self._factor = rotary_steps(body.rope, body.head_width, embedding.device)
        self.register_buffer("_steps", steps, persistent=False)
        self.register_buffer("_embedding", embedding, persistent=False)
        self.register_buffer("_scale", tap_scale.float(), persistent=False)

    @property
    def rank(self) -> int:
        """The rank of the Markov head."""
        return self.markov_head.shape.rank

    def forward(self, taps: Tensor, blocks: Blocks, *, recomputes: bool = False) -> Tensor:
        """Normalised vectors for the head, [rows, blocks, slots, hidden size].

        `taps` [rows, tokens, taps x hidden size] are the target's over the rows. With `recomputes`, the backward pass
        computes the activations of layers again.
        """
        rows, count, slots = blocks.tokens.shape
        context = self.hidden_norm(self.fc(taps.float() * self._scale))
        masks = self._embedding[self.shape.mask_token].expand(rows, count, slots - 1, -1)
        residual = torch.cat([self._embedding[blocks.tokens[:, :, :1]], masks], dim=2).float().flatten(1, 2)
        places = torch.arange(taps.shape[1], device=taps.device)
        own = (blocks.anchors.unsqueeze(2) + torch.arange(slots, device=taps.device)).flatten(1)
        turns = Turn(own, self._steps, self._factor), Turn(places.unsqueeze(0), self._steps, self._factor)
        mask = _mask(blocks, places, self.fc_type(context))
        for layer in self.layers:
            residual = run_layer(layer, residual, context, turns, mask, recomputes=recomputes)
        found: Tensor = self.norm(residual.view(rows, count, slots, -1))
        return found

    def fc_type(self, like: Tensor) -> torch.dtype:
        """The type in which matrices are multiplied at present, on the device of a tensor."""
        kind = like.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32

    def mixed(self, hidden: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """What the Markov head multiplies with its second matrix, [..., slots, rank], and the embeddings of `before`.

        `hidden` are [..., slots, hidden size], `before` [..., slots] the tokens before those that are predicted.
        """
        embedded = self.markov_head.markov_w1(before)
        state = torch.zeros_like(embedded[..., 0, :])
        if self.markov_head.shape.kind != "rnn":
            return self.markov_head.step(embedded, hidden, state)[0], embedded
        found = []
        for slot in range(before.shape[-1]):
            mixed, state = self.markov_head.step(embedded[..., slot, :], hidden[..., slot, :], state)
            found.append(mixed)
        return torch.stack(found, dim=-2), embedded

    def sureness(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Logits [...] of the confidence that the first candidate is right."""
        found: Tensor = self.confidence_head["proj"](torch.cat([hidden, embedded], dim=-1).float())
        return found.squeeze(-1)

    def weights(self) -> DraftWeights:
        """What is stored of the drafter. All processes that share a sharded one have to call it."""
        tensors = {name: value.detach() for name, value in whole(self.state_dict()).items()}
        tensors["fc.weight"] = tensors["fc.weight"] * self._scale
        return DraftWeights(tensors, None)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Begin with stored weights, such as those of `weights()`."""
        self.load_state_dict(dict(weights) | {"fc.weight": weights["fc.weight"] / self._scale})

    @torch.no_grad()
    def start(self, layers: Sequence[Mapping[str, Tensor]], norm: Tensor) -> None:
        """Begin as decoder layers of the target, with its final norm [hidden size].

        `layers` are parameters by their names in Llama, one for each own layer. Key and value heads are repeated for
        own ones; of a wider MLP, the largest elements are taken.
        """
        body = self.shape.body
        for own, found in zip(self.layers, layers, strict=True):
            goals = dict(own.named_parameters())
            chosen = _largest_inner(found, body.intermediate_size)
            for name, value in found.items():
                part, goal = value.float(), goals.get(name)
                if goal is None:
                    continue
                if name.startswith("mlp."):
                    part = part[:, chosen] if "down" in name else part[chosen]
                elif name.startswith(("self_attn.k_proj", "self_attn.v_proj")):
                    heads = part.view(-1, body.head_width, part.shape[1])
                    part = heads.repeat_interleave(max(1, body.kv_heads // len(heads)), dim=0).flatten(0, 1)
                if goal.shape == part.shape:
                    goal.copy_(part)
        self.norm.weight.copy_(norm)
        size, taps = body.hidden_size, self.shape.taps
        self.fc.weight.mul_(0.3)
        for tap in range(taps):
            self.fc.weight[:, tap * size : (tap + 1) * size].diagonal().add_(1.0 if tap + 1 == taps else 0.3)
        # The directions in which embeddings differ most: tokens of one kind begin with similar rows.
        embedding = self._embedding.float()
        directions = torch.linalg.eigh(embedding.T @ embedding).eigenvectors[:, -self.rank :]
        first = (embedding - embedding.mean(dim=0)) @ directions
        self.get_parameter(FIRST).copy_(first / first.std(dim=0).clamp(min=1e-6))
        self.get_parameter(SECOND).zero_()
        for parameter in self.confidence_head.parameters():
            parameter.zero_()


def _mask(blocks: Blocks, places: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores [rows, 1, slots, tokens + slots]: 0 for a slot's text before its anchor and its block."""
    rows, count, slots = blocks.tokens.shape
    before = (places < blocks.anchors.unsqueeze(2)) & (places >= blocks.starts.unsqueeze(2))  # [rows, blocks, tokens]
    block = torch.arange(count * slots, device=places.device) // slots
    seen = torch.cat(
        [
            before.unsqueeze(2).expand(-1, -1, slots, -1).flatten(1, 2),
            (block.unsqueeze(1) == block).expand(rows, -1, -1),
        ],
        dim=2,
    )
    return torch.zeros(seen.shape, dtype=dtype, device=places.device).masked_fill_(~seen, -torch.inf).unsqueeze(1)


def _largest_inner(layer: Mapping[str, Tensor], count: int) -> Tensor:
    """The elements inside an MLP whose matrices are the largest, ascending."""
    sizes = [layer[f"mlp.{part}_proj.weight"].float().norm(dim=1) for part in ("gate", "up")]
    sizes.append(layer["mlp.down_proj.weight"].float().norm(dim=0))
    total = torch.stack(sizes).log().sum(dim=0)
    return total.topk(min(count, len(total))).indices.sort().values
