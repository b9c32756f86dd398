"""How much memory of a device the training of a DSpark drafter takes; see `workers/distill/memory.py`."""

from __future__ import annotations

from dataclasses import dataclass

from workers.distill.memory import (
    FLOAT,
    HALF,
    LONG,
    LOSS_CHUNK,
    ModuleSize,
    TargetSize,
    TrainingMemory,
    layer_matrices,
    muon_flops,
    shared,
    update_bytes,
)
from workers.model.public_shapes import MaskedBlockShape

_LEADING = 64
"""Tokens whose probabilities are stored for a position of a text."""


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """A batch of a training on blocks, of one rank."""

    rows: int
    length: int
    """Tokens of a row."""
    blocks: int
    """Blocks of a row."""


def text_bytes(taps: int, hidden_size: int, value: int = HALF) -> int:
    """Bytes of one token of a text: its hidden states, its most probable successors and its place.

    `value` is the size of a number of a hidden state.
    """
    return value * taps * hidden_size + (4 + 2) * _LEADING + 3 * LONG + 1


def block_size(shape: MaskedBlockShape) -> ModuleSize:
    """The parameters of a DSpark drafter."""
    body, size = shape.body, shape.body.hidden_size
    if shape.markov is None:
        raise ValueError(f"shape: {shape} is refused; it must have a Markov head")
    layer = layer_matrices(body, size) + 2 * size + 2 * body.head_width
    rank = shape.markov.rank
    mixing = {"vanilla": 0, "gated": (size + rank) * rank, "rnn": (2 * rank + size) * 3 * rank}[shape.markov.kind]
    bias = {"vanilla": 0, "gated": rank, "rnn": 3 * rank}[shape.markov.kind]
    tokens = rank * (shape.markov.vocabulary + shape.markov.rows)
    fc = shape.taps * size * size
    others = fc + 2 * size + tokens + mixing + bias + size + rank + 1
    inner = body.layers * layer_matrices(body, size) + fc + mixing
    return ModuleSize(layer, body.layers, others, inner, max(fc, size * body.intermediate_size))


def block_memory(
    target: TargetSize,
    shape: MaskedBlockShape,
    batch: BlockBatch,
    text_tokens: int,
    *,
    ranks: int = 1,
    recomputes: bool = False,
) -> TrainingMemory:
    """Memory of the training of a DSpark drafter on one rank of a GPU.

    `batch` and `text_tokens`, the tokens of all rows with padding, are those of one rank.
    """
    body, size = shape.body, block_size(shape)
    hidden, rank = body.hidden_size, 0 if shape.markov is None else shape.markov.rank
    slots = batch.rows * batch.blocks * shape.slots
    context = batch.rows * batch.length
    pairs = batch.rows * (batch.length + batch.blocks * shape.slots)  # keys of all rows
    queries, keys, inner = body.heads * body.head_width, body.kv_heads * body.head_width, body.intermediate_size
    residual = FLOAT * slots * hidden
    layer = (
        2 * residual  # inputs of both norms
        + 3 * HALF * slots * hidden + 2 * HALF * context * hidden  # of the projections: a cast for each
        + FLOAT * (slots * queries + pairs * keys)  # of the norms of heads
        + 2 * HALF * (slots * queries + pairs * queries)  # queries, keys, values and output of attention ...
        + HALF * slots * queries  # ... with heads side by side
        + 2 * HALF * slots * hidden + 4 * HALF * slots * inner
    )  # fmt: skip
    stem = (
        HALF * context * shape.taps * hidden
        + (2 if recomputes else 1) * FLOAT * context * hidden
        + HALF * pairs * batch.blocks * shape.slots  # the mask
        + (FLOAT + LONG) * _LEADING * slots
        + 2 * FLOAT * (slots + context) * body.head_width  # sines and cosines
    )
    vectors = slots * (hidden + rank)
    end = 2 * residual + HALF * slots * (hidden + 2 * rank)
    rows = _rows(target, shape)
    loss = 2 * FLOAT * vectors + (HALF * (hidden + rank) + FLOAT * rank) * rows
    loss += (HALF + FLOAT) * min(LOSS_CHUNK, slots) * rows
    kept = residual if recomputes else layer
    casts = HALF * size.parameters
    late = HALF * (size.layer + size.others) if recomputes else casts
    whole, stored = _whole(size, ranks), text_tokens * text_bytes(shape.taps, hidden)
    backward = 3 * residual + max(4 * HALF * slots * inner, 2 * HALF * slots * queries + 6 * HALF * pairs * queries)
    return TrainingMemory(
        target=target.ends + (HALF * rows * hidden if rows < target.vocabulary else 0),
        weights=shared(FLOAT * size.parameters, ranks),
        optimizer=shared(size.optimizer_bytes, ranks),
        texts=stored,
        forward=whole + casts + stem + body.layers * kept + end + loss,
        backward=whole + late + stem + backward + _backward(size, kept, layer, ranks, recomputes=recomputes),
        update=update_bytes(size, ranks),
        between=target.rank_bytes,
    )


def block_flops(target: TargetSize, shape: MaskedBlockShape, batch: BlockBatch, *, recomputes: bool = False) -> int:
    """Operations of one step of the training of a DSpark drafter on one rank: of its matrices and of attention."""
    body = shape.body
    hidden, rank = body.hidden_size, 0 if shape.markov is None else shape.markov.rank
    slots, context = batch.rows * batch.blocks * shape.slots, batch.rows * batch.length
    queries, keys = body.heads * body.head_width, body.kv_heads * body.head_width
    in_layer = 2 * slots * (2 * hidden * queries + 3 * hidden * body.intermediate_size)
    in_layer += 2 * (slots + context) * 2 * hidden * keys
    attention = 4 * slots * (batch.length + batch.blocks * shape.slots) * queries
    # The backward pass has two products for each, and five instead of two in attention, which computes scores again.
    layers = body.layers * (in_layer * (4 if recomputes else 3) + attention * (4.5 if recomputes else 3.5))
    inputs = 2 * 2 * context * shape.taps * hidden * hidden  # no gradient of the target's states
    loss = 2 * slots * _rows(target, shape) * (2 * (hidden + rank) + rank)
    matrices = [(hidden, queries)] * 2 + [(hidden, keys)] * 2 + [(hidden, body.intermediate_size)] * 3
    update = body.layers * sum(muon_flops(*sizes) for sizes in matrices) + muon_flops(hidden, shape.taps * hidden)
    return int(layers) + inputs + loss + update


def _rows(target: TargetSize, shape: MaskedBlockShape) -> int:
    """Tokens that the drafter can propose. Fewer than all have a copy of their rows of the target's head."""
    return target.vocabulary if shape.markov is None else shape.markov.rows


def _whole(size: ModuleSize, ranks: int) -> int:
    """Bytes of the parameters that are whole on a rank during a step, beside its own part."""
    return 0 if ranks == 1 else FLOAT * size.others


def _backward(size: ModuleSize, kept: int, layer: int, ranks: int, *, recomputes: bool) -> int:
    """Activations of layers and gradients, where both together are largest on the way from the last layer down."""
    # On several ranks, a layer and its gradients are whole, and the gradients of the other parameters.
    whole = 0 if ranks == 1 else FLOAT * (2 * size.layer + size.others)
    return whole + max(
        (size.layers - done) * kept
        + (layer if recomputes else 0)
        + shared(FLOAT * (done * size.layer + (size.others if ranks == 1 else 0)), ranks)
        for done in range(size.layers)
    )
