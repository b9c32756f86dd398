"""How much memory of a device the training of a DSpark drafter takes: a pure function of sizes, tensor by tensor.

It counts what `workers/distill/dspark` keeps: float32 parameters, gradients and optimizer
states, the frozen target in bfloat16, texts with hidden states, activations as autograd stores them with products in
bfloat16, and the logits of the loss. It leaves out what an allocator loses to fragments and what libraries reserve.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.model.public_shapes import DecoderShape, MaskedBlockShape

_HALF, _FLOAT, _LONG = 2, 4, 8
"""Bytes of a number in bfloat16, in float32, and of an int64."""
_LOSS_CHUNK = 4096
"""Positions whose logits over the whole vocabulary are in memory at once."""
_MUON_STEPS = 4
"""Steps of Muon's iteration in all trainings."""
_LEADING = 64
"""Tokens whose probabilities are stored for a position of a text, for DSpark."""


@dataclass(frozen=True, slots=True)
class TargetSize:
    """The sizes of a frozen target in bfloat16."""

    parameters: int
    hidden_size: int
    vocabulary: int

    def share(self, ranks: int) -> int:
        """Bytes of one rank's part: layers are split among ranks, embedding and output head are whole on each."""
        ends = 2 * self.vocabulary * self.hidden_size
        layers = max(0, self.parameters - ends)
        return _HALF * (min(self.parameters, ends) + -(-layers // ranks))


@dataclass(frozen=True, slots=True)
class ModuleSize:
    """The parameters of a module."""

    layer: int
    """Parameters of one decoder layer."""
    layers: int
    others: int
    """Parameters outside of layers: on each rank, they are whole during a step."""
    momentum_only: int
    """Parameters whose optimizer (Muon) keeps one state; the others' (AdamW) keeps two."""
    largest: int
    """Parameters of the largest matrix of Muon."""

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layer * self.layers + self.others

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the states of the optimizers, on all ranks together."""
        return _FLOAT * (2 * self.parameters - self.momentum_only)


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes on one rank. Three phases of a step take turns, so the largest of them counts."""

    target: int
    weights: int
    """The module's parameters, float32."""
    optimizer: int
    texts: int
    """Tokens, hidden states and probabilities of all texts that are trained on."""
    forward: int
    """Activations at the loss, with its logits."""
    backward: int
    """Activations and gradients where they are largest."""
    update: int
    """Gradients and what the optimizers compute with."""

    @property
    def held(self) -> int:
        """Bytes between steps."""
        return self.target + self.weights + self.optimizer + self.texts

    @property
    def peak(self) -> int:
        """The most bytes of a step."""
        return self.held + max(self.forward, self.backward, self.update)


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """A batch of a training on blocks, of one rank."""

    rows: int
    length: int
    """Tokens of a row."""
    blocks: int
    """Blocks of a row."""


def text_bytes(taps: int, hidden_size: int) -> int:
    """Bytes of one token of a text: its hidden states, its most probable successors and its place."""
    return _HALF * taps * hidden_size + (4 + 2) * _LEADING + 3 * _LONG + 1


def block_size(shape: MaskedBlockShape) -> ModuleSize:
    """The parameters of a DSpark drafter."""
    body, size = shape.body, shape.body.hidden_size
    if shape.markov is None:
        raise ValueError(f"shape: {shape} is refused; it must have a Markov head")
    layer = _layer_matrices(body, size) + 2 * size + 2 * body.head_width
    rank = shape.markov.rank
    mixing = {"vanilla": 0, "gated": (size + rank) * rank, "rnn": (2 * rank + size) * 3 * rank}[shape.markov.kind]
    bias = {"vanilla": 0, "gated": rank, "rnn": 3 * rank}[shape.markov.kind]
    tokens = rank * (shape.markov.vocabulary + shape.markov.rows)
    fc = shape.taps * size * size
    others = fc + 2 * size + tokens + mixing + bias + size + rank + 1
    inner = body.layers * _layer_matrices(body, size) + fc + mixing
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
    residual = _FLOAT * slots * hidden
    layer = (
        2 * residual  # inputs of both norms
        + 3 * _HALF * slots * hidden + 2 * _HALF * context * hidden  # of the projections: a cast for each
        + _FLOAT * (slots * queries + pairs * keys)  # of the norms of heads
        + 2 * _HALF * (slots * queries + pairs * queries)  # queries, keys, values and output of attention ...
        + _HALF * slots * queries  # ... with heads side by side
        + 2 * _HALF * slots * hidden + 4 * _HALF * slots * inner
    )  # fmt: skip
    stem = (
        _HALF * context * shape.taps * hidden
        + (2 if recomputes else 1) * _FLOAT * context * hidden
        + _HALF * pairs * batch.blocks * shape.slots  # the mask
        + (_FLOAT + _LONG) * _LEADING * slots
        + 2 * _FLOAT * (slots + context) * body.head_width  # sines and cosines
    )
    vectors = slots * (hidden + rank)
    end = 2 * residual + _HALF * slots * (hidden + 2 * rank)
    loss = 2 * _FLOAT * vectors + (_HALF * (hidden + rank) + _FLOAT * rank) * target.vocabulary
    loss += (_HALF + _FLOAT) * min(_LOSS_CHUNK, slots) * target.vocabulary
    kept = residual if recomputes else layer
    casts = _HALF * size.parameters
    late = _HALF * (size.layer + size.others) if recomputes else casts
    whole = _whole(size, ranks)
    backward = 3 * residual + max(4 * _HALF * slots * inner, 2 * _HALF * slots * queries + 6 * _HALF * pairs * queries)
    return TrainingMemory(
        target=target.share(ranks),
        weights=-(-_FLOAT * size.parameters // ranks),
        optimizer=-(-size.optimizer_bytes // ranks),
        texts=text_tokens * text_bytes(shape.taps, hidden),
        forward=whole + casts + stem + body.layers * kept + end + loss,
        backward=whole + late + stem + backward + _backward(size, kept, layer, ranks, recomputes=recomputes),
        update=_update(size, ranks),
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
    loss = 2 * slots * target.vocabulary * (2 * (hidden + rank) + rank)
    matrices = [(hidden, queries)] * 2 + [(hidden, keys)] * 2 + [(hidden, body.intermediate_size)] * 3
    update = body.layers * sum(_muon_flops(*sizes) for sizes in matrices) + _muon_flops(hidden, shape.taps * hidden)
    return int(layers) + inputs + loss + update


def _muon_flops(rows: int, columns: int) -> int:
    """Operations of the Newton-Schulz iteration of Muon for a matrix."""
    short, long = sorted((rows, columns))
    return _MUON_STEPS * 2 * short * short * (2 * long + short)


def _layer_matrices(body: DecoderShape, inputs: int) -> int:
    """Parameters of the matrices of a Llama layer whose attention reads so many inputs."""
    queries, keys = body.heads * body.head_width, body.kv_heads * body.head_width
    return inputs * (queries + 2 * keys) + queries * body.hidden_size + 3 * body.hidden_size * body.intermediate_size


def _whole(size: ModuleSize, ranks: int) -> int:
    """Bytes of the parameters that are whole on a rank during a step, beside its own part."""
    return 0 if ranks == 1 else _FLOAT * size.others


def _backward(size: ModuleSize, kept: int, layer: int, ranks: int, *, recomputes: bool) -> int:
    """Activations of layers and gradients, where both together are largest on the way from the last layer down."""
    # On several ranks, a layer and its gradients are whole, and the gradients of the other parameters.
    whole = 0 if ranks == 1 else _FLOAT * (2 * size.layer + size.others)
    return whole + max(
        (size.layers - done) * kept
        + (layer if recomputes else 0)
        + -(-_FLOAT * (done * size.layer + (size.others if ranks == 1 else 0)) // ranks)
        for done in range(size.layers)
    )


def _update(size: ModuleSize, ranks: int) -> int:
    """Gradients, and what Muon computes with for the largest matrix."""
    return -(-_FLOAT * size.parameters // ranks) + 10 * size.largest
