"""How much memory of a device the training of heads or of an EAGLE head takes; see `workers/distill/memory.py`.

One process trains them beside the target's embedding and head. It has the whole target as well when it computes hidden
states, which are stored on the disk, and when it serves the target to measure the module.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.distill.memory import (
    FLOAT,
    HALF,
    LONG,
    ModuleSize,
    TargetSize,
    TrainingMemory,
    layer_matrices,
    muon_flops,
    update_bytes,
)
from workers.model.draft_shapes import EagleShape, HeadsShape
from workers.model.drafting.selector import CANDIDATES

ALTERNATIVES = 16
"""Tokens of the target whose probabilities are stored for a position of a text."""


@dataclass(frozen=True, slots=True)
class ModuleBatch:
    """A batch of the training of a module. All of its tokens are those of answers: no more are learned."""

    rows: int
    length: int
    """Tokens of a row."""
    taps: int
    paths: int
    """Positions that a draft begins at."""
    depths: int
    """Tokens of a draft."""
    vocabulary: int
    """Tokens that the module can propose."""

    @property
    def predicted(self) -> int:
        """Tokens that all drafts of the batch predict."""
        return self.paths * self.depths


def module_size(target: TargetSize, shape: HeadsShape | EagleShape, taps: int) -> ModuleSize:
    """The parameters of a module that is trained with Muon."""
    matrices = [rows * columns for rows, columns in _matrices(target, shape, taps)]
    vectors = 0
    if isinstance(shape, EagleShape):
        vectors = target.hidden_size * (taps + 2 + 2 * shape.layers)
    return ModuleSize(0, 0, sum(matrices) + vectors, sum(matrices), max(matrices))


def module_memory(target: TargetSize, shape: HeadsShape | EagleShape, batch: ModuleBatch) -> TrainingMemory:
    """Memory of the training of heads or of an EAGLE head, which one process trains on one GPU."""
    size = module_size(target, shape, batch.taps)
    casts = HALF * size.momentum_only
    logits, hidden = FLOAT * batch.predicted * batch.vocabulary, batch.predicted * target.hidden_size
    texts = batch.rows * batch.length * (LONG + HALF * batch.taps * target.hidden_size + (LONG + FLOAT) * ALTERNATIVES)
    if isinstance(shape, HeadsShape):
        kept, chosen = _of_heads(target.hidden_size, shape, batch), _of_choice(target.hidden_size, shape, batch)
        forward = texts + kept + chosen + 2 * HALF * hidden
        backward = max(kept + chosen + logits, kept + 4 * logits)
    else:
        kept, inputs = _of_roll_outs(shape, batch), batch.rows * (batch.length - 1)
        forward = texts + kept + FLOAT * inputs * target.hidden_size + 2 * FLOAT * hidden
        backward = kept + max(4 * logits, _gradients(shape, batch))
    ends = (target.vocabulary + batch.vocabulary) * (HALF * target.hidden_size + LONG)
    return TrainingMemory(
        target=ends,
        weights=FLOAT * size.parameters,
        optimizer=size.optimizer_bytes,
        texts=0,
        forward=casts + forward + logits + logits * HALF // FLOAT,
        backward=casts + backward,
        update=update_bytes(size, 1),
        beside=target.share(1),
    )


def module_flops(target: TargetSize, shape: HeadsShape | EagleShape, batch: ModuleBatch) -> int:
    """Operations of one step: of the module's matrices, of attention and of the target's head."""
    size = target.hidden_size
    update = sum(muon_flops(*sizes) for sizes in _matrices(target, shape, batch.taps))
    loss = 2 * 2 * batch.predicted * size * batch.vocabulary  # no gradient of the target's head
    if isinstance(shape, HeadsShape):
        mixed = 2 * batch.paths * size * shape.mix_rank * (2 * 2 + 3)  # nor one of what the first matrix reads
        deep = 2 * batch.predicted * size * size * (3 if shape.mix_rank else 2)
        ranked = batch.predicted if shape.selector_rank else 0
        chosen = 2 * ranked * size * (shape.selector_rank * (2 * 3 + 3) + 2 * CANDIDATES)
        return mixed + deep + loss + chosen + update
    layer, inputs = shape.layer, batch.rows * (batch.length - 1)
    read = sum(depth + 1 for depth in range(batch.depths)) * (batch.length - 1)  # keys of a query, at all depths
    entry = 2 * size * size + shape.layers * layer_matrices(layer, size)
    matrices = 2 * 3 * inputs * (entry * batch.depths + batch.taps * size * size)
    attention = 14 * inputs * read * layer.heads * layer.head_width * shape.layers
    return matrices + attention + loss + update


def _matrices(target: TargetSize, shape: HeadsShape | EagleShape, taps: int) -> list[tuple[int, int]]:
    """The sizes of all matrices of a module."""
    size = target.hidden_size
    if isinstance(shape, HeadsShape):
        ranks = [rank for rank in (shape.mix_rank, shape.selector_rank) if rank]
        return [(shape.depths * size, size), *((rank, 2 * size) for rank in ranks), *((size, rank) for rank in ranks)]
    layer = shape.layer
    queries, keys = layer.heads * layer.head_width, layer.kv_heads * layer.head_width
    own = [(queries, size), (size, queries), *[(keys, size)] * 2, *[(size, layer.intermediate_size)] * 3]
    return [(size, taps * size), (size, 2 * size), *own * shape.layers]


def _of_heads(size: int, shape: HeadsShape, batch: ModuleBatch) -> int:
    """What heads store for the backward pass."""
    mixed = batch.paths * (2 * size + 2 * shape.mix_rank) if shape.mix_rank else 0
    return HALF * (mixed + batch.paths * size + batch.predicted * size)


def _of_choice(size: int, shape: HeadsShape, batch: ModuleBatch) -> int:
    """What the selector stores: its own vectors, and rows of the target's head for the candidates of each token.

    All depths are counted, though it ranks none of the first.
    """
    ranked = batch.predicted if shape.selector_rank else 0
    return HALF * ranked * (3 * size + 2 * shape.selector_rank + CANDIDATES * size)


def _of_roll_outs(shape: EagleShape, batch: ModuleBatch) -> int:
    """What all depths of an EAGLE head store for the backward pass, and the fusion of hidden states."""
    layer, size, inputs = shape.layer, shape.layer.hidden_size, batch.rows * (batch.length - 1)
    queries, norm = layer.heads * layer.head_width, 2 * FLOAT * inputs * size  # a norm stores input and result

    def of_layer(depth: int) -> int:
        return (
            2 * norm
            + HALF * inputs * (3 * size + 2 * size + 4 * layer.intermediate_size)  # a cast for each projection
            + HALF * inputs * (2 * queries + 2 * (depth + 1) * queries)  # queries and output of attention, all keys
            + HALF * (depth + 1) * (batch.length - 1) ** 2  # the mask
            + 2 * FLOAT * inputs * layer.head_width  # sines and cosines
        )

    around = 2 * norm + HALF * inputs * 2 * size  # norms of features and outputs, the cast of the entry
    fusion = (FLOAT + HALF) * inputs * batch.taps * size
    return fusion + sum(around + shape.layers * of_layer(depth) for depth in range(batch.depths))


def _gradients(shape: EagleShape, batch: ModuleBatch) -> int:
    """Gradients of activations where they are largest, in the last depth."""
    layer, inputs = shape.layer, batch.rows * (batch.length - 1)
    queries = layer.heads * layer.head_width
    attention = HALF * inputs * queries * (2 + 2 * batch.depths)
    residual = (3 * FLOAT + batch.depths * HALF) * inputs * layer.hidden_size
    return residual + max(4 * HALF * inputs * layer.intermediate_size, attention)
