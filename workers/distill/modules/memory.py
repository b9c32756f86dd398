"""How much memory of a device a training in one process takes: of a module, or of a small model that is a draft itself.

See `workers/distill/memory.py`. A module is trained beside the target's embedding and head. The whole target is there
as well while it computes hidden states, which are stored on the disk, and while it is served to measure the module. A
model of the target's layers is trained beside a float32 copy of embedding and head, and reads no hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workers.distill.memory import (
    FLOAT,
    HALF,
    LONG,
    ModuleSize,
    TargetSize,
    TrainingMemory,
    layer_activations,
    layer_gradients,
    layer_matrices,
    muon_flops,
    update_bytes,
)
from workers.model.draft_shapes import BlockShape, EagleShape, ExitShape, HeadsShape, LayerShape
from workers.model.drafting.selector import CANDIDATES

ALTERNATIVES = 16
"""Tokens of the target whose probabilities are stored for a position of a text."""


@dataclass(frozen=True, slots=True)
class StudentShape:
    """A Llama model with the target's embedding and head: a draft of kind `layers`."""

    title: ClassVar[str] = "A small model"
    layer: LayerShape
    layers: int


TrainedShape = HeadsShape | EagleShape | BlockShape | ExitShape | StudentShape
"""What one process trains."""


@dataclass(frozen=True, slots=True)
class ModuleBatch:
    """A batch of such a training. All of its tokens are those of answers: no more are learned."""

    rows: int
    length: int
    """Tokens of a row."""
    taps: int
    paths: int
    """Positions that a draft begins at."""
    depths: int
    """Tokens of a draft."""
    vocabulary: int
    """Tokens that can be proposed."""

    @property
    def predicted(self) -> int:
        """Tokens that all drafts of the batch predict."""
        return self.paths * self.depths


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a kind adds to the memory of a step, in bytes."""

    stored: int
    """Activations for the backward pass."""
    vectors: int = 0
    """Copies of the vectors for the head that are there at the loss."""
    gradients: int = 0
    """Gradients of activations where they are largest."""
    chosen: int = 0
    """Activations of a selector."""
    ranked: int = 0
    """What a selector computes with besides, while it ranks."""


def module_size(target: TargetSize, shape: TrainedShape, taps: int) -> ModuleSize:
    """The parameters that are trained: of a module with Muon, of a model with AdamW."""
    matrices, size = [rows * columns for rows, columns in _matrices(target, shape, taps)], target.hidden_size
    match shape:
        case HeadsShape():
            vectors = 0
        case ExitShape():
            vectors = size
        case StudentShape():
            return ModuleSize(0, 0, sum(matrices) + size * (1 + 2 * shape.layers), 0, 0)
        case EagleShape() | BlockShape():
            slots = shape.block if isinstance(shape, BlockShape) else 0
            vectors = size * (taps + 2 + 2 * shape.layers + slots)
    return ModuleSize(0, 0, sum(matrices) + vectors, sum(matrices), max(matrices, default=0))


def module_memory(target: TargetSize, shape: TrainedShape, batch: ModuleBatch) -> TrainingMemory:
    """Memory of a training in one process on one GPU."""
    size, is_student = module_size(target, shape, batch.taps), isinstance(shape, StudentShape)
    parts = _parts(target.hidden_size, shape, batch)
    casts = HALF * sum(rows * columns for rows, columns in _matrices(target, shape, batch.taps))
    casts += HALF * batch.vocabulary * target.hidden_size if is_student else 0  # of the head, which is in float32
    logits = FLOAT * batch.predicted * batch.vocabulary
    texts = batch.rows * batch.length * (LONG + HALF * batch.taps * target.hidden_size + (LONG + FLOAT) * ALTERNATIVES)
    of_ends = (FLOAT if is_student else HALF) * target.hidden_size + LONG
    ends, weights = (target.vocabulary + batch.vocabulary) * of_ends, FLOAT * size.parameters
    at_loss = texts + parts.vectors + logits + logits * HALF // FLOAT + parts.chosen + parts.ranked
    return TrainingMemory(
        target=ends,
        weights=weights,
        optimizer=size.optimizer_bytes,
        texts=0,
        forward=casts + parts.stored + at_loss,
        backward=casts + parts.stored + max(parts.chosen + logits, 4 * logits, parts.gradients),
        update=update_bytes(size, 1),
        # No student is there yet while the target writes texts.
        between=target.whole + (0 if is_student else ends + weights + size.optimizer_bytes),
    )


def module_flops(target: TargetSize, shape: TrainedShape, batch: ModuleBatch) -> int:
    """Operations of one step: of the matrices, of attention and of the target's head."""
    size, context = target.hidden_size, batch.rows * batch.length
    loss = 2 * 2 * batch.predicted * size * batch.vocabulary  # no gradient of the target's head
    if rank := getattr(shape, "selector_rank", 0):
        loss += 2 * batch.predicted * size * (rank * (2 * 3 + 3) + 2 * CANDIDATES)
    update = sum(muon_flops(*sizes) for sizes in _matrices(target, shape, batch.taps))
    match shape:
        case HeadsShape():
            mixed = 2 * batch.paths * size * shape.mix_rank * (2 * 2 + 3)  # nor one of what the first matrix reads
            deep = 2 * batch.predicted * size * size * (3 if shape.mix_rank else 2)
            return mixed + deep + loss + update
        case ExitShape():
            return loss + update
    layer = shape.layer
    matrices, queries = layer_matrices(layer, size), layer.heads * layer.head_width
    match shape:
        case StudentShape():
            inputs, read, around, update = context, batch.length, 0, 0
        case BlockShape():
            keys = layer.kv_heads * layer.head_width
            inputs, read = batch.predicted, batch.length + batch.predicted // batch.rows
            around = batch.paths * 2 * size * size + context * batch.taps * size * (size + 2 * shape.layers * keys)
        case EagleShape():
            inputs = batch.rows * (batch.length - 1) * batch.depths
            # Keys of a query in the mean of all depths.
            read = (batch.depths + 1) * (batch.length - 1) // 2
            around = inputs * 2 * size * size + inputs // batch.depths * batch.taps * size * size
    # The backward pass has two products for each, and five instead of two in attention, which computes scores again.
    products = 2 * 3 * (shape.layers * inputs * matrices + around)
    attention = 14 * shape.layers * inputs * read * queries
    return products + attention + loss + update


def _matrices(target: TargetSize, shape: TrainedShape, taps: int) -> list[tuple[int, int]]:
    """The sizes of all matrices that are trained."""
    size = target.hidden_size
    ranks = [rank for name in ("mix_rank", "selector_rank") if (rank := getattr(shape, name, 0))]
    ranked = [*((rank, 2 * size) for rank in ranks), *((size, rank) for rank in ranks)]
    match shape:
        case HeadsShape():
            return [(shape.depths * size, size), *ranked]
        case ExitShape():
            return []
    layer = shape.layer
    queries, keys = layer.heads * layer.head_width, layer.kv_heads * layer.head_width
    own = [(queries, size), (size, queries), *[(keys, size)] * 2, *[(size, layer.intermediate_size)] * 3]
    if isinstance(shape, BlockShape):
        own += [(keys, taps * size)] * 2
    entry = [] if isinstance(shape, StudentShape) else [(size, taps * size), (size, 2 * size)]
    return [*entry, *own * shape.layers, *ranked]


def _parts(size: int, shape: TrainedShape, batch: ModuleBatch) -> _Parts:
    match shape:
        case HeadsShape():
            mixed = batch.paths * (2 * size + 2 * shape.mix_rank) if shape.mix_rank else 0
            stored = HALF * (mixed + batch.paths * size + batch.predicted * size)
            chosen = _of_choice(size, shape.selector_rank, batch)
            return _Parts(stored, vectors=2 * HALF * batch.predicted * size, chosen=chosen)
        case ExitShape():
            vectors = FLOAT * batch.predicted * size
            return _Parts(vectors, vectors=2 * vectors)
        case StudentShape():
            inputs, keys = batch.rows * batch.length, shape.layer.kv_heads * shape.layer.head_width
            stack = shape.layers * layer_activations(shape.layer, inputs, inputs * keys)
            end = 2 * FLOAT * inputs * size  # the last norm
            return _Parts(stack + end, gradients=layer_gradients(shape.layer, inputs, inputs * keys))
        case BlockShape():
            return _of_block(shape, batch)
        case EagleShape():
            return _of_roll_outs(shape, batch)


def _of_choice(size: int, rank: int, batch: ModuleBatch) -> int:
    """What a selector stores: its own vectors, and rows of the target's head for the candidates of each token.

    All depths are counted, though it ranks none of the first.
    """
    return HALF * batch.predicted * (3 * size + 2 * rank + CANDIDATES * size) if rank else 0


def _of_block(shape: BlockShape, batch: ModuleBatch) -> _Parts:
    """A block drafter: context from hidden states, and a pass over all slots, which attend to both."""
    layer, size, layers = shape.layer, shape.layer.hidden_size, shape.layers
    context, slots = batch.rows * batch.length, batch.predicted
    wide, keys = context * batch.taps * size, context + slots
    fused = (FLOAT + HALF * (1 + 2 * layers)) * wide + layers * FLOAT * context * layer.head_width
    entry = 2 * (FLOAT + HALF) * batch.paths * size  # the norm of features, the cast of the entry
    queries = layer.heads * layer.head_width
    stack = layer_activations(layer, slots, keys * queries)
    stack += HALF * slots * keys // batch.rows  # the mask
    stack += 2 * FLOAT * slots * layer.head_width  # sines and cosines
    vectors = 2 * FLOAT * slots * size
    return _Parts(
        fused + entry + layers * stack + 2 * FLOAT * slots * size,
        vectors=vectors,
        gradients=layer_gradients(layer, slots, keys * queries),
        chosen=_of_choice(size, shape.selector_rank, batch),
        # Rows of the head are in float32 until the product casts them, as are corrected vectors.
        ranked=FLOAT * slots * size * (CANDIDATES + 1) if shape.selector_rank else 0,
    )


def _of_roll_outs(shape: EagleShape, batch: ModuleBatch) -> _Parts:
    """All depths of an EAGLE head, and the fusion of hidden states."""
    layer, size, inputs = shape.layer, shape.layer.hidden_size, batch.rows * (batch.length - 1)
    residual, keys = FLOAT * inputs * size, inputs * layer.heads * layer.head_width  # of one depth

    def of_layer(depth: int) -> int:
        mask = HALF * (depth + 1) * (batch.length - 1) ** 2
        turns = 2 * FLOAT * inputs * layer.head_width  # sines and cosines
        return layer_activations(layer, inputs, (depth + 1) * keys) + mask + turns

    around = 4 * residual + HALF * inputs * 2 * size  # norms of features and outputs, the cast of the entry
    fusion = (FLOAT + HALF) * inputs * batch.taps * size
    return _Parts(
        fusion + sum(around + shape.layers * of_layer(depth) for depth in range(batch.depths)),
        vectors=residual + 2 * FLOAT * batch.predicted * size,
        gradients=layer_gradients(layer, inputs, batch.depths * keys) + batch.depths * HALF * inputs * size,
    )
