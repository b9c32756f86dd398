"""Counts the weights of a model on disk, from the headers of its safetensors files, or of its GGUF file.

A packed matrix of a quantized checkpoint counts as the matrix that it stands for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from cluster.core.errors import ModelLoadError
from workers.model.draft_card import is_distilled, read_card
from workers.model.stored.gguf_file import GgufFile
from workers.model.stored.quantized_checkpoint import FORMATS, QuantizedCheckpoint, quantization_of
from workers.model.stored.source import stored_alone
from workers.model.target_ends import outline, parameter_shapes, read_config
from workers.model.weight_files import config_values, weight_files

_TOKEN_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "shared.weight")
_EMBEDDINGS = (*_TOKEN_EMBEDDINGS, "embed_positions.weight", "wpe.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
_OF_SOURCE = re.compile(r"(^|\.)encoder\.|\.(encoder_attn\.[kv]_proj|EncDecAttention\.[kv])\.")
"""Weights of an encoder-decoder model that compute once for a source instead of once for each token."""
_MATRICES = ("weight", "weights")
"""The ends of the names of matrices, unlike those of biases, norms and other parameters."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|block)\.(\d+)\.")
_PREDICTING = ("mtp.", "model.mtp_layers.", "model.mtp.")
"""Begin the names of layers for multi-token prediction that are not numbered as decoder layers are."""
_NUMBERED = re.compile(r"model\.layers\.(\d+)\.")
"""Begins the names of a decoder-only model's layers, and of those for multi-token prediction after them."""
_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class WeightCounts:
    """Sizes of a model."""

    parameters: int
    """All stored parameters. A tied tensor counts once."""
    multiply_adds: int
    """Multiply-adds of the matrices per token: all matrices, with the head and without embeddings. Attention over
    stored keys and values is left out, and what an encoder-decoder model computes of its source."""
    source_parameters: int = 0
    """The parameters that compute once for a source: those of an encoder, and its keys and values."""


def count_weights(directory: Path) -> WeightCounts:
    """Count the weights of a model directory, also of a distilled draft, whose head is the target's.

    Raises `ModelLoadError` if a file cannot be read.
    """
    shapes = _computed(directory)
    matrices = {
        name: math.prod(shape) for name, shape in shapes.items() if len(shape) == 2 and not name.endswith("bias")
    }
    of_source = {name: math.prod(shape) for name, shape in shapes.items() if _OF_SOURCE.search(name)}
    lookups = sum(count for name, count in matrices.items() if name.endswith(_EMBEDDINGS))
    tied = next((count for name, count in matrices.items() if name.endswith(_TOKEN_EMBEDDINGS)), 0)
    head = tied if not any(name.endswith(_HEADS) for name in matrices) else 0
    if is_distilled(directory):
        card = read_card(directory)
        head = (card.vocabulary_size or card.target_vocabulary_size) * card.hidden_size
    parameters = sum(math.prod(shape) for shape in shapes.values())
    once = sum(count for name, count in matrices.items() if name in of_source and not name.endswith(_EMBEDDINGS))
    return WeightCounts(parameters, sum(matrices.values()) - lookups - once + head, sum(of_source.values()))


def count_matrices(directory: Path) -> dict[str, int]:
    """The number of weights of each matrix that the model computes with. Raises `ModelLoadError`."""
    shapes = _computed(directory)
    return {name: math.prod(shape) for name, shape in shapes.items() if name.endswith(_MATRICES) and len(shape) == 2}


def count_mtp_layer(directory: Path) -> int:
    """Multiply-adds of a pass of the layer for multi-token prediction in a model's own files, with the head.

    Raises `ModelLoadError`.
    """
    shapes, of_model = _parameter_shapes(directory), _computed(directory)
    copies = (*_TOKEN_EMBEDDINGS, "shared_head.head.weight")
    used = [shape for name, shape in shapes.items() if name not in of_model and not name.endswith(copies)]
    head = next((shape for name, shape in shapes.items() if name.endswith((*_HEADS, *_TOKEN_EMBEDDINGS))), ())
    return sum(math.prod(shape) for shape in (*used, head) if len(shape) == 2)


def count_layers(directory: Path) -> int:
    """The number of a model's decoder layers. Raises `ModelLoadError`."""
    names = [name for name in count_matrices(directory) if not _OF_SOURCE.search(name)]
    return 1 + max((int(layer[1]) for name in names if (layer := _LAYER.search(name))), default=-1)


def count_part(
    directory: Path, layers: int | None, skip_attention: Collection[int] = (), skip_mlp: Collection[int] = ()
) -> int:
    """Multiply-adds per token of a model that ends after its first `layers` and leaves out some parts of them.

    They include the head. `None` means all layers. Raises `ModelLoadError`.
    """
    left_out = 0
    for name, count in count_matrices(directory).items():
        layer = _LAYER.search(name)
        if layer is None or _OF_SOURCE.search(name):
            continue
        number, skipped = int(layer[1]), skip_attention if _ATTENTION.search(name) else skip_mlp
        if (layers is not None and number >= layers) or number in skipped:
            left_out += count
    return count_weights(directory).multiply_adds - left_out


def tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in the safetensors of a directory, or of a GGUF model's each parameter in its file.

    Without any, of each parameter that its configuration states. Raises `ModelLoadError`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    if (source := stored_alone(directory)) is not None:
        stored = GgufFile(source)
        return {name: shape for name, shape in outline(read_config(directory)).shapes.items() if name in stored}
    files = weight_files(directory)
    if not files:
        return parameter_shapes(read_config(directory))
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                shapes.update({name: tuple(stored.get_slice(name).get_shape()) for name in stored.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"weights {str(file)!r} cannot be read: {error}") from error
    return shapes


def _parameter_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter in a directory, quantized or not. Raises `ModelLoadError`."""
    settings = quantization_of(directory)
    is_packed = settings is not None and str(settings.get("quant_method")) in FORMATS and bool(weight_files(directory))
    return QuantizedCheckpoint(directory).shapes() if is_packed else tensor_shapes(directory)


def _computed(directory: Path) -> dict[str, tuple[int, ...]]:
    """The tensors that a model computes with: not those of layers that predict several tokens for drafts.

    Such layers have names of their own, or are numbered after the last decoder layer. Raises `ModelLoadError`.
    """
    shapes = {name: shape for name, shape in _parameter_shapes(directory).items() if not name.startswith(_PREDICTING)}
    layers = config_values(directory).get("num_hidden_layers")
    if not isinstance(layers, int):
        return shapes
    own = {name: match for name in shapes if (match := _NUMBERED.match(name)) is not None}
    return {name: shape for name, shape in shapes.items() if name not in own or int(own[name][1]) < layers}
