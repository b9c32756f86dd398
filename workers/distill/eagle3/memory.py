"""How much memory of a device the training of an EAGLE-3 head takes; see `workers/distill/memory.py`."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from workers.distill.memory import (
    FLOAT,
    HALF,
    LONG,
    LOSS_CHUNK,
    ModuleSize,
    TargetSize,
    TrainingMemory,
    muon_flops,
    shared,
    update_bytes,
)
from workers.model.public_shapes import FeatureShape


@dataclass(frozen=True, slots=True)
class RollOutBatch:
    """A batch of a training by roll-outs, of one rank. All of its tokens are those of answers: no more are learned."""

    rows: int
    length: int
    """Tokens of a row, padding included."""
    depths: int
    """Steps of a roll-out."""
    vocabulary: int
    """Tokens that the head can propose."""
    packs: bool = False
    """Whether rows have several texts. Then each has a mask of its own."""

    @property
    def masks(self) -> int:
        """Bytes of masks of positions among each other: one for all rows, or one for each that has several texts."""
        return (self.rows if self.packs else 1) * (self.length - 1) ** 2

    @property
    def inputs(self) -> int:
        """Positions that the head computes at each depth."""
        return self.rows * (self.length - 1)

    @property
    def drafted(self) -> int:
        """Positions whose output predicts a token of the text."""
        return self.rows * (self.length - 2)


def text_bytes(shape: FeatureShape, value: int = HALF) -> int:
    """Bytes of one token of a text: its hidden states, the target's last one too, and its id.

    `value` is the size of a number of a hidden state.
    """
    return value * (shape.taps + 1) * shape.target_hidden_size + LONG


def head_size(shape: FeatureShape, vocabulary: int) -> ModuleSize:
    """The parameters of a head that can propose so many tokens. They are whole on each rank during a step."""
    sizes = [prod(size) for size in shape.tensors().values()]
    inner = [prod(size) for size in shape.tensors().values() if len(size) > 1]
    others = sum(sizes) + vocabulary * shape.body.hidden_size
    return ModuleSize(0, 0, others, sum(inner), max(inner))


def roll_out_memory(
    target: TargetSize,
    shape: FeatureShape,
    batch: RollOutBatch,
    text_tokens: int,
    *,
    ranks: int = 1,
    recomputes: bool = False,
) -> TrainingMemory:
    """Memory of the training of an EAGLE-3 head on one rank of a GPU.

    `batch` and `text_tokens`, the tokens of all texts without padding, are those of one rank.
    """
    body, size = shape.body, head_size(shape, batch.vocabulary)
    hidden, wide, inputs, drafted = body.hidden_size, shape.taps * shape.target_hidden_size, batch.inputs, batch.drafted
    queries, keys, inner = body.heads * body.head_width, body.kv_heads * body.head_width, body.intermediate_size
    residual, square = FLOAT * inputs * hidden, batch.masks

    def layer(depth: int) -> int:
        """What a depth stores for the backward pass."""
        return (
            3 * residual  # its feature, the input of the MLP's norm, its output
            + HALF * inputs * (3 * 2 * hidden + 2 * hidden + 4 * inner)  # of the projections: a cast for each
            + HALF * inputs * (2 * queries + 2 * (depth + 1) * queries)  # queries and output of attention, all keys
            + HALF * (depth + 1) * square  # the mask
        )

    def kept(depth: int) -> int:
        """What is left of it in the forward pass."""
        return 2 * residual + 2 * HALF * inputs * keys + (depth + 1) * square if recomputes else layer(depth)

    texts = batch.rows * batch.length * text_bytes(shape)
    stem = texts + residual + inputs * wide * (HALF + (FLOAT if shape.tap_norm != "none" else 0))
    logits = FLOAT * drafted * batch.vocabulary
    losses = batch.depths * (2 * logits + (FLOAT + HALF) * drafted * hidden + HALF * batch.vocabulary * hidden)
    whole, stored = 0 if ranks == 1 else FLOAT * size.parameters, text_tokens * text_bytes(shape)
    casts, last = HALF * size.momentum_only, batch.depths - 1
    depths = sum(kept(depth) for depth in range(batch.depths)) + (square if batch.packs else 0)  # which text is whose
    end = 3 * logits + HALF * drafted * shape.target_hidden_size  # logits, a product, what the target wants
    attention = HALF * inputs * queries * (2 + 2 * batch.depths)
    gradients = (3 + last) * residual + casts + FLOAT * batch.vocabulary * hidden
    gradients += max(4 * HALF * inputs * inner, attention) + (layer(last) if recomputes else 0)
    goals = texts + logits + 2 * FLOAT * min(LOSS_CHUNK, drafted) * target.vocabulary
    return TrainingMemory(
        target=target.ends,
        weights=shared(FLOAT * size.parameters, ranks),
        optimizer=shared(size.optimizer_bytes, ranks),
        texts=stored,
        forward=max(goals, whole + casts + stem + depths + losses + end),
        # On several ranks, all gradients are whole before they are summed.
        backward=max(whole + casts + stem + depths + gradients, 3 * whole + texts),
        update=texts + update_bytes(size, ranks),
        between=target.rank_bytes,
    )


def roll_out_flops(target: TargetSize, shape: FeatureShape, batch: RollOutBatch, *, recomputes: bool = False) -> int:
    """Operations of one step of the training of an EAGLE-3 head on one rank: of its matrices and of attention."""
    body, tensors = shape.body, shape.tensors()
    queries = body.heads * body.head_width
    in_layer = sum(prod(size) for name, size in tensors.items() if name.startswith("layers.") and len(size) > 1)
    read = sum(depth + 1 for depth in range(batch.depths)) * (batch.length - 1)  # keys of a query, at all depths
    # The backward pass has two products for each, and five instead of two in attention, which computes scores again.
    # What is computed again ends before the last product, whose result the backward pass does not need.
    again = in_layer - body.intermediate_size * body.hidden_size if recomputes else 0
    layers = 2 * batch.inputs * (3 * in_layer + again) * batch.depths
    attention = int(4 * batch.inputs * read * queries * (4.5 if recomputes else 3.5))
    entry = 2 * batch.inputs * prod(tensors["fc.weight"]) * (3 if shape.tap_norm == "each" else 2)
    loss = 2 * batch.drafted * body.hidden_size * batch.vocabulary * batch.depths * 3
    goals = 2 * batch.drafted * shape.target_hidden_size * target.vocabulary
    update = sum(muon_flops(*size) for size in tensors.values() if len(size) == 2)
    return layers + attention + entry + loss + goals + update
