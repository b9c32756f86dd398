"""Reads the parts of a target that a distilled draft shares with it: embedding, head, final norm, encoder.

`transformers` is imported where it is called: it takes seconds and 150 MB, and not every reader needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from cluster.core.errors import ModelLoadError
from workers.model.draft_card import DraftDescription, is_distilled
from workers.model.stored.gguf_file import GgufFile
from workers.model.stored.quantized_checkpoint import QuantizedCheckpoint, is_dequantized
from workers.model.stored.source import stored_alone
from workers.model.weight_files import config_values, weight_files

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_UNSHARED = ("Gemma",)
"""Names of families whose ends are not shared, because their embeddings are scaled."""
_TEXT_PARTS = ("model.language_model.", "model.")
"""How checkpoints of images and texts begin the names of the parts that read and write text, and how models do."""
_LAYER_COUNTS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
    *("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"),
)
"""How configurations name a number of layers."""
_NESTED = ("text_config", "encoder", "decoder")
"""The parts of a configuration that state layers of their own."""


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A model's class, the shapes of its parameters, and the names of its embedding, head and final norm."""

    kind: type[PreTrainedModel]
    shapes: dict[str, tuple[int, ...]]
    embedding: str
    head: str
    norm: str | None
    """`None` where the final norm is not an RMS norm that a draft can share."""
    norm_offset: float = 0.0
    """What is added to the weights of the final norm before they multiply."""
    logit_factor: float = 1.0
    """What the products of the head and a normalized hidden state are multiplied by to become logits."""
    decoder: frozenset[str] | None = None
    """The parameters of an encoder-decoder model's decoder, without its embedding; `None` for other models."""

    def is_own(self, name: str) -> bool:
        """Whether a parameter is a draft's own: it belongs neither to embedding nor head, and to no encoder."""
        if self.decoder is not None:
            return name in self.decoder
        return not name.startswith((f"{self.embedding}.", f"{self.head}."))


@dataclass(frozen=True, slots=True)
class SharedEnds:
    """A target's shared parameters: memory-mapped, or de-quantized from a GGUF file."""

    outline: ModelOutline
    config: PreTrainedConfig
    tensors: dict[tuple[str, str], torch.Tensor]
    """By (`embedding`, `head` or `norm`, parameter). The head is absent if it is tied to the embedding."""


def outline(config: PreTrainedConfig) -> ModelOutline:
    """The outline of a model with this configuration. No weights are made."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    names = {module: name for name, module in model.named_modules()}
    shapes = {name: tuple(values.shape) for name, values in model.state_dict().items()}
    norm = getattr(model.get_decoder(), "norm", None)
    is_shared = not any(family in type(norm).__name__ for family in _UNSHARED)
    offset = _norm_offset(norm) if is_shared else None
    return ModelOutline(
        type(model),
        shapes,
        names[model.get_input_embeddings()],
        names[model.get_output_embeddings()],
        None if offset is None else names[norm],
        offset or 0.0,
        1.0 if offset is None or config.is_encoder_decoder else _logit_factor(model),
        frozenset(decoder_parameters(model)) if config.is_encoder_decoder else None,
    )


def parameter_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter of a model with this configuration; of tied ones, the first. No weights are made."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    return {name: tuple(values.shape) for name, values in model.named_parameters()}


def _norm_offset(norm: Any) -> float | None:
    """What an RMS norm adds to its weights before they multiply: 0, or 1. `None` for what is no such norm.

    It is measured, with numbers so large that the epsilon has no effect.
    """
    weight = getattr(norm, "weight", None)
    if not isinstance(norm, nn.Module) or not isinstance(weight, nn.Parameter) or weight.dim() != 1:
        return None
    tried: Any = deepcopy(norm).to_empty(device="cpu").float()
    numbers, weights = 1000.0 * torch.linspace(-1.0, 2.0, len(weight)), torch.linspace(-0.5, 1.5, len(weight))
    with torch.no_grad():
        for name, parameter in tried.named_parameters():
            parameter.copy_(weights if name == "weight" else torch.ones_like(parameter))
        try:
            found = tried(numbers.unsqueeze(0))[0]
        except (TypeError, IndexError):  # a norm of several inputs, or of several outputs
            return None
    unit = numbers * torch.rsqrt(numbers.square().mean())
    offsets = (offset for offset in (0.0, 1.0) if torch.allclose(found, unit * (weights + offset), atol=1e-4))
    return next(offsets, None)


def _logit_factor(model: Any) -> float:
    """What a model without weights multiplies the products of its head by; 1 where it changes them in another way.

    It is measured: the decoder returns known numbers, so large that a soft cap shows, and the head returns its inputs.
    The model is of no use afterwards.
    """
    from transformers.modeling_outputs import MoeModelOutputWithPast

    try:
        numbers = 1000.0 * torch.linspace(-1.0, 2.0, model.get_output_embeddings().in_features)[None, None]
        model.base_model.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=numbers)
        model.get_output_embeddings().forward = lambda states: states
        found = model(input_ids=torch.zeros((1, 1), dtype=torch.long), use_cache=False).logits.float()
        factor = float(f"{float((found * numbers).double().sum() / numbers.square().double().sum()):.6g}")
        return factor if torch.allclose(found, factor * numbers, rtol=1e-4) else 1.0
    except Exception:  # code of a family that nobody has seen may raise anything
        return 1.0


def logit_factor(config: PreTrainedConfig) -> float:
    """What a decoder-only model with this configuration multiplies the products of its head by to make logits.

    1 for a model that changes them in another way. No weights are made.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config.get_text_config()))
    return _logit_factor(model)


def scaled_head(target: Any) -> torch.Tensor:
    """The output matrix [tokens, hidden size] of a decoder-only model, multiplied by the factor of its logits."""
    weight: torch.Tensor = target.get_output_embeddings().weight.detach()
    factor = logit_factor(target.config)
    return weight if factor == 1.0 else (weight.float() * factor).to(weight.dtype)


def decoder_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The parameters of the decoder of an encoder-decoder model, by name, without embeddings and fixed positions."""
    decoder: nn.Module = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    return {
        f"{prefix}.{name}": parameter
        for name, parameter in decoder.named_parameters()
        if parameter.requires_grad and not name.startswith("embed_tokens.")
    }


def decoder_vocabulary_size(config: PreTrainedConfig) -> int:
    """Number of tokens that a model writes: an encoder may read other ones."""
    return int(getattr(config, "decoder_vocab_size", None) or config.get_text_config().vocab_size)


def decoder_layer_count(config: PreTrainedConfig) -> int:
    """Number of a model's decoder layers; for encoder-decoder models the common name counts those of the encoder."""
    names = ("decoder_layers", "num_decoder_layers") if config.is_encoder_decoder else ()
    return int(next((getattr(config, name) for name in names if hasattr(config, name)), config.num_hidden_layers))


def read_shared_with_encoder(target: Path, card: DraftDescription) -> dict[str, torch.Tensor]:
    """All tensors of an encoder-decoder target but those of its decoder's layers. Raises `ModelLoadError`."""
    found = outline(read_target_config(target, card))
    tensors = {
        name: values
        for file in weight_files(target)
        for name, values in read_tensors(file).items()
        if not found.is_own(name)
    }
    embedding = found.shapes[f"{found.embedding}.weight"]  # a tied matrix may be stored under another name
    if not any(tuple(values.shape) == embedding for values in tensors.values()):
        raise ModelLoadError(f"target directory {str(target)!r}: its safetensors hold no {found.embedding}.weight")
    return tensors


def read_shared_ends(target: Path, card: DraftDescription) -> SharedEnds:
    """Read the parts that a draft with this card shares with its target. Raises `ModelLoadError`."""
    config = read_target_config(target, card)
    found = outline(config)
    ends = [("embedding", found.embedding), ("head", found.head), ("norm", found.norm)]
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    prefixes = tuple(f"{prefix}." for _, prefix in ends if prefix is not None)
    for stored, values in named_tensors(target, (name for name in found.shapes if name.startswith(prefixes))):
        name = _TEXT_PARTS[1] + stored.removeprefix(_TEXT_PARTS[0]) if stored.startswith(_TEXT_PARTS[0]) else stored
        for end, prefix in ends:
            if prefix is None or not name.startswith(f"{prefix}.") or tuple(values.shape) != found.shapes.get(name):
                continue
            if values.dtype.itemsize == 1:  # its scale is elsewhere
                raise ModelLoadError(
                    f"target directory {str(target)!r}: {stored} is {values.dtype}; drafts that share it need "
                    "it as float32, bfloat16 or float16: set target.quantization to none"
                )
            tensors[end, name.removeprefix(f"{prefix}.")] = values
    if ("embedding", "weight") not in tensors:
        raise ModelLoadError(f"target directory {str(target)!r}: its safetensors hold no {found.embedding}.weight")
    if not config.tie_word_embeddings and ("head", "weight") not in tensors:
        raise ModelLoadError(f"target directory {str(target)!r}: its safetensors hold no {found.head}.weight")
    return SharedEnds(found, config, tensors)


def read_config(directory: Path) -> PreTrainedConfig:
    """The configuration of the model in a directory.

    Raises `ModelLoadError`, also for more layers than its weights have tensors.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    _check_layers(directory)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError),
        StrictDataclassError,
    ) as error:
        raise ModelLoadError(
            f"model directory {str(directory)!r}: its configuration cannot be read: {error}"
        ) from error
    return config


def _check_layers(directory: Path) -> None:
    """Raise `ModelLoadError` for more layers than tensors: `transformers` would make them all before it misses any.

    A draft may state the layers of an encoder that its target has.
    """
    values = config_values(directory)
    parts = [values, *(part for key in _NESTED if isinstance(part := values.get(key), dict))]
    found = [(key, count) for part in parts for key in _LAYER_COUNTS if isinstance(count := part.get(key), int)]
    files = [] if is_distilled(directory) else list(directory.glob("*.safetensors"))
    if not found or not files:
        return
    tensors = 0
    try:
        for file in files:
            with safe_open(file, framework="pt") as stored:
                tensors += len(stored.keys())
    except (OSError, SafetensorError):  # reading the weights reports it
        return
    for key, count in found:
        if count > tensors:
            raise ModelLoadError(
                f"model directory {str(directory)!r}: {key} in config.json: {count} is refused; it must be at most "
                f"{tensors}, the number of tensors in its files"
            )


def read_target_config(target: Path, card: DraftDescription) -> PreTrainedConfig:
    """The configuration of a target. Raises `ModelLoadError` unless it has the sizes that the card names."""
    config = read_config(target).get_text_config()
    check_config(target, f"the config.json of the target {target.name!r}", config, card)
    return config


def check_config(directory: Path, what: str, config: PreTrainedConfig, card: DraftDescription) -> None:
    """Raise `ModelLoadError` unless a configuration has the sizes that the card names."""
    text = config.get_text_config()
    for field, wanted, found in (
        ("target_vocabulary_size", card.target_vocabulary_size, decoder_vocabulary_size(text)),
        ("hidden_size", card.hidden_size, text.hidden_size),
    ):
        if wanted and found != wanted:
            raise ModelLoadError(
                f"draft directory {str(directory)!r}: {field} is {wanted} for the draft and {found} in {what}"
            )


def named_tensors(directory: Path, parameters: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a model's safetensors, memory-mapped, with their names.

    Of a checkpoint of GPTQ and the like, those of these `parameters` whose matrices are quantized follow, de-quantized
    one after another. A GGUF model whose directory has no weights is read from its file: those of these `parameters`
    that it has, de-quantized to float32 one after another. Raises `ModelLoadError`.
    """
    quantized = QuantizedCheckpoint(directory) if is_dequantized(directory) else None
    for file in weight_files(directory):
        for name, tensor in read_tensors(file).items():
            if quantized is None or quantized.matrix_of(name) is None:
                yield name, tensor
    if quantized is not None:
        for name in filter(quantized.is_quantized, parameters):
            yield name, quantized.matrix(name).dequantized().to(quantized.plain_dtype(name))
    if (source := stored_alone(directory)) is not None:
        stored = GgufFile(source)
        for name in parameters:
            if name in stored:
                yield name, stored.plain(name)


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file, memory-mapped. Raises `ModelLoadError`."""
    try:
        with safe_open(file, framework="pt") as stored:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - it is no mapping
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"weights {str(file)!r} cannot be read: {error}") from error
