"""How much memory of a device a training takes: what the functions of all kinds of drafts share.

They are pure functions of sizes and count tensor by tensor: float32 parameters, gradients and optimizer states, what
the training has of the frozen target in bfloat16, texts with hidden states, activations as autograd stores them with
products in bfloat16, and the logits of the loss. They leave out what an allocator loses to fragments and what libraries
reserve.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.errors import ConfigurationError
from workers.model.draft_shapes import LayerShape
from workers.model.public_shapes import DecoderShape

HALF, FLOAT, LONG = 2, 4, 8
"""Bytes of a number in bfloat16, in float32, and of an int64."""
LOSS_CHUNK = 4096
"""Positions whose logits over the whole vocabulary are in memory at once."""
_MUON_STEPS = 4
"""Steps of Muon's iteration in all trainings."""


@dataclass(frozen=True, slots=True)
class TargetSize:
    """The sizes of a frozen target in bfloat16."""

    parameters: int
    hidden_size: int
    vocabulary: int
    ranks: int = 1
    """Tensor-parallel ranks that write texts and compute hidden states. They have ended when a training begins."""
    stored: int | None = None
    """Bytes of all weights as these ranks store them; `None`: those in bfloat16."""

    @property
    def whole(self) -> int:
        """Bytes of all weights in bfloat16."""
        return HALF * self.parameters

    @property
    def rank_bytes(self) -> int:
        """Bytes of the weights of a rank that writes texts and computes hidden states."""
        return shared(self.whole if self.stored is None else self.stored, self.ranks)

    @property
    def ends(self) -> int:
        """Bytes of embedding and output head."""
        return HALF * min(self.parameters, 2 * self.vocabulary * self.hidden_size)


@dataclass(frozen=True, slots=True)
class ModuleSize:
    """The parameters of a module."""

    layer: int
    """Parameters of one of the layers that are whole on each rank only while they compute."""
    layers: int
    others: int
    """All other parameters: on each rank, they are whole during a step."""
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
        return FLOAT * (2 * self.parameters - self.momentum_only)


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes on one rank. Three phases of a step take turns, so the largest of them counts."""

    target: int
    """What the step reads of the target: embedding and head."""
    weights: int
    """The module's parameters, float32."""
    optimizer: int
    texts: int
    """Tokens, hidden states and probabilities of all texts that are trained on, where the device keeps them."""
    forward: int
    """Activations at the loss, with its logits."""
    backward: int
    """Activations and gradients where they are largest."""
    update: int
    """Gradients and what the optimizers compute with."""
    between: int
    """What is held before steps or between them while the whole target, or a rank's part of it, is in memory: to write
    texts, to compute hidden states, to measure."""

    @property
    def held(self) -> int:
        """Bytes between steps."""
        return self.target + self.weights + self.optimizer + self.texts

    @property
    def peak(self) -> int:
        """The most bytes of a step."""
        return self.held + max(self.forward, self.backward, self.update)

    @property
    def most(self) -> int:
        """The most bytes of a step, or of what happens between two."""
        return max(self.peak, self.between)


def check_texts(tokens: int, token_bytes: int, free: int, device: str) -> None:
    """Raise `ConfigurationError` if texts with their hidden states take more than a device's free bytes."""
    needed = tokens * token_bytes
    if needed > free:
        raise ConfigurationError(
            f"--most-tokens, or --answer-tokens of pilotfish distill: {tokens:,} tokens of texts with their hidden "
            f"states take {needed:,} bytes, and {device} has {free:,} free, for {free // token_bytes:,} tokens; texts "
            "that are written stay, so choose fewer of them with other --answers, or --work of pilotfish distill"
        )


def shared(count: int, ranks: int) -> int:
    """The bytes of one rank's part of `count` bytes."""
    return -(-count // ranks)


def muon_flops(rows: int, columns: int) -> int:
    """Operations of the Newton-Schulz iteration of Muon for a matrix."""
    short, long = sorted((rows, columns))
    return _MUON_STEPS * 2 * short * short * (2 * long + short)


def layer_matrices(body: DecoderShape | LayerShape, inputs: int) -> int:
    """Parameters of the matrices of a Llama layer whose attention reads so many inputs."""
    queries, keys = body.heads * body.head_width, body.kv_heads * body.head_width
    return inputs * (queries + 2 * keys) + queries * body.hidden_size + 3 * body.hidden_size * body.intermediate_size


def layer_activations(layer: LayerShape, inputs: int, keys: int) -> int:
    """Bytes that a Llama layer stores for the backward pass.

    `inputs` are its positions, `keys` the numbers in all keys that they attend to; values are as many. A norm stores
    its input and its result, each projection a cast of its own. Masks and rotary positions are not counted.
    """
    size, queries = layer.hidden_size, layer.heads * layer.head_width
    norms = 2 * 2 * FLOAT * inputs * size
    projections = HALF * inputs * (3 * size + 2 * size + 4 * layer.intermediate_size)
    return norms + projections + HALF * (2 * inputs * queries + 2 * keys)


def layer_gradients(layer: LayerShape, inputs: int, keys: int) -> int:
    """Bytes of the gradients of a layer's activations where they are largest: in the MLP, or in attention."""
    queries = layer.heads * layer.head_width
    widest = max(4 * inputs * layer.intermediate_size, 2 * inputs * queries + 2 * keys)
    return 3 * FLOAT * inputs * layer.hidden_size + HALF * widest


def update_bytes(size: ModuleSize, ranks: int) -> int:
    """Bytes of gradients, and of what Muon computes with for the largest matrix."""
    return shared(FLOAT * size.parameters, ranks) + 10 * size.largest
