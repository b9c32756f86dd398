"""Files of drafting modules: `config.json`, and one safetensors file with the module's own parameters.

A module that a public format describes is stored in this format instead. Otherwise, a parameter is stored in bfloat16,
or, for matrices of an int8 file, as int8 with a float32 scale for each row under its name with `.scale`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cluster.core.drafting import Tap
from cluster.core.errors import ModelLoadError, shorten
from workers.model.draft_card import (
    EARLIER_CARD,
    LAYERS,
    VOCABULARY,
    WEIGHTS,
    DraftCard,
    DraftDescription,
    is_distilled,
    read_card,
)
from workers.model.draft_shapes import BlockShape, EagleShape, ExitShape, HeadsShape, Shape, TableShape
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.exit_norm import ExitNorm
from workers.model.drafting.heads import MedusaHeads
from workers.model.drafting.public import PublicModule
from workers.model.drafting.public_form import obstacle, trained_card
from workers.model.drafting.table import SuccessorTable
from workers.model.encoder_decoder.ends import DecoderEnds, read_decoder_ends
from workers.model.formats.checkpoint import Checkpoint
from workers.model.formats.medusa import write_medusa
from workers.model.formats.pilotfish import SCALE, restored
from workers.model.formats.registry import DraftWeights, read_draft, read_weights, with_stored_names
from workers.model.public_shapes import FeatureShape, MaskedBlockShape, MedusaShape, PublicShape
from workers.model.target_ends import read_shared_ends, read_target_config, read_tensors
from workers.model.tensor_file import in_bfloat16, write_tensors
from workers.model.weight_files import CONFIG

_BESIDE_WEIGHTS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")
"""Further files of a draft that is a language model of its own."""
_ENTRY_BYTES = 256
"""Most bytes that the header of a file of weights takes for one tensor."""
_LEAST_INT8 = 65536
"""Elements from which a matrix of an int8 file is stored as int8."""

DraftingModule = MedusaHeads | BlockDrafter | EagleHead | ExitNorm | SuccessorTable
ModuleType = TypeVar("ModuleType", bound=DraftingModule | PublicModule)


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafting module with the frozen ends of its target."""

    card: DraftDescription
    ends: TargetEnds
    module: DraftingModule | PublicModule


def make_module(ends: TargetEnds, shape: Shape, taps: Sequence[Tap]) -> DraftingModule:
    """An untrained module in float32."""
    match shape:
        case HeadsShape():
            return MedusaHeads(ends, shape)
        case BlockShape():
            return BlockDrafter(ends, shape, len(taps))
        case EagleShape():
            return EagleHead(ends, shape, len(taps))
        case ExitShape():
            return ExitNorm(ends, shape)
        case TableShape():
            return SuccessorTable(shape, len(ends.embedding))


def load_drafter(
    directory: Path,
    target_directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    kind: str | None = None,
    *,
    taps: Sequence[Tap] = (),
) -> Drafter:
    """Load a module of any format from its own directory and the ends from its target's directory.

    `kind` is the kind that the caller needs; `taps` take the place of those that the draft names. Raises
    `ModelLoadError`, which names the field or the tensor, if a directory does not match the card or the kind.
    """
    card = read_draft(directory, taps)
    where = f"draft directory {str(directory)!r}"
    if card.kind == LAYERS or card.shape is None or (kind is not None and card.kind != kind):
        raise ModelLoadError(f"{where}: kind is {card.kind!r}; needed {kind or 'a drafting module'}")
    weights = read_weights(directory, card)
    ends = _ends(target_directory, card, weights, dtype, device)
    if isinstance(card.shape, PublicShape):
        tensors = {name: value.to(device, dtype) for name, value in weights.tensors.items()}
        return Drafter(card, ends, PublicModule(card.shape, tensors))
    module = make_module(ends, card.shape, card.taps)
    _fill(module, weights.tensors, where)
    module.to(device=device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    module.eval().requires_grad_(False)
    return Drafter(card, ends, module)


def read_trained(directory: Path, target_directory: Path) -> DraftCard:
    """The card of a draft that was trained here, in any format that it is stored in.

    Raises `ModelLoadError` for a draft that cannot be trained further.
    """
    return read_card(directory) if is_distilled(directory) else trained_card(read_draft(directory), target_directory)


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    """The parameters of a stored module by name, int8 matrices multiplied by their scales. Raises `ModelLoadError`."""
    if is_distilled(directory):
        return restored(read_tensors(directory / WEIGHTS))
    card = read_draft(directory)
    if not isinstance(card.shape, MedusaShape):
        raise TypeError(f"{type(card.shape).__name__} is no shape of heads")
    tensors = read_weights(directory, card).tensors
    return {"weights": torch.cat([tensors[f"{depth}.0.weight"] for depth in range(card.shape.depths)])}


def load_ends(
    target_directory: Path, card: DraftDescription, vocabulary: Tensor | None, dtype: torch.dtype, device: torch.device
) -> TargetEnds:
    """The ends of a target for a draft with this card. `vocabulary` [tokens], int64, reduces the head.

    Raises `ModelLoadError` for a target of other sizes, or whose final norm is neither a plain RMS norm nor missing.
    """
    return _ends(target_directory, card, DraftWeights(vocabulary=vocabulary), dtype, device)


def _ends(
    target_directory: Path, card: DraftDescription, weights: DraftWeights, dtype: torch.dtype, device: torch.device
) -> TargetEnds:
    """The ends of a target for a draft, with the draft's own embedding and head in the place of the target's."""
    if weights.embedding is not None and weights.head is not None and not _reads_final_states(card):
        read_target_config(target_directory, card)
        own = weights.embedding.to(device, dtype), weights.head.to(device, dtype)
        return TargetEnds(*own, None, 0.0, weights.vocabulary).to(device)
    whole = _whole_ends(target_directory, card)
    vocabulary = weights.vocabulary

    def reduced(values: Tensor) -> Tensor:
        rows = values if vocabulary is None else values[vocabulary.to(values.device)]
        return rows.to(device, dtype)

    embedding = whole.embedding if weights.embedding is None else weights.embedding
    return TargetEnds(
        embedding.to(device, dtype),
        reduced(whole.head) if weights.head is None else weights.head.to(device, dtype),
        None if whole.norm is None else whole.norm.to(device, dtype),
        float(whole.epsilon),
        vocabulary,
        None if whole.bias is None or weights.head is not None else reduced(whole.bias),
    ).to(device)


def read_target_ends(target_directory: Path, card: DraftDescription) -> DecoderEnds:
    """The target's own ends as its files have them, whatever a draft with this card brings of its own.

    Raises `ModelLoadError` for a target of other sizes, or whose final norm is neither a plain RMS norm nor missing.
    """
    return _whole_ends(target_directory, replace(card, shape=None))


def _whole_ends(target_directory: Path, card: DraftDescription) -> DecoderEnds:
    config = read_target_config(target_directory, card)
    if config.is_encoder_decoder:
        return read_decoder_ends(target_directory, config)
    return _decoder_only_ends(target_directory, card)


def _reads_final_states(card: DraftDescription) -> bool:
    """Whether a draft reads the target's last hidden state after the final norm, and not taps alone."""
    shape = card.shape
    return not isinstance(shape, MaskedBlockShape) and not (isinstance(shape, FeatureShape) and shape.taps > 0)


def _decoder_only_ends(target_directory: Path, card: DraftDescription) -> DecoderEnds:
    shared = read_shared_ends(target_directory, card)
    norm = shared.tensors.get(("norm", "weight"))
    if norm is None:
        raise ModelLoadError(
            f"target directory {str(target_directory)!r}: model type {shared.config.model_type!r} ends with a norm "
            f"other than a plain RMS norm, which drafting modules need, but for those that read taps alone and have an "
            f"embedding and a head of their own"
        )
    if shared.outline.norm_offset:
        norm = norm.float() + shared.outline.norm_offset
    embedding = shared.tensors["embedding", "weight"]
    head = shared.tensors.get(("head", "weight"), embedding)
    has_own_scale = isinstance(card.shape, MaskedBlockShape) and card.shape.changes_scale
    if shared.outline.logit_factor != 1.0 and not has_own_scale:
        head = head.float() * shared.outline.logit_factor
    return DecoderEnds(embedding, head, norm, float(shared.config.rms_norm_eps), None)


def save_drafter(
    directory: Path,
    card: DraftCard,
    module: nn.Module,
    vocabulary: Tensor | None,
    *,
    target_directory: Path,
    int8: bool = False,
) -> None:
    """Write a module into an existing directory, in a public format if one describes it; see `obstacle`.

    Raises `ModelLoadError` for a target that does not match the card.
    """
    if isinstance(module, MedusaHeads) and not obstacle(card, target_directory, int8=int8):
        ends = load_ends(target_directory, card, vocabulary, torch.bfloat16, torch.device("cpu"))
        blocks = module.weights.view(-1, card.hidden_size, card.hidden_size)
        write_medusa(directory, card, blocks, ends.head, ends.vocabulary)
    else:
        save_own(directory, card, module, vocabulary, int8=int8)


def save_own(directory: Path, card: DraftCard, module: nn.Module, vocabulary: Tensor | None, *, int8: bool) -> None:
    """Write the configuration and the weights of a module."""
    tensors: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        value = value.detach().cpu()
        if not value.is_floating_point():
            tensors[name] = value.contiguous()
        elif int8 and value.dim() >= 2 and value.numel() >= _LEAST_INT8:
            scale = value.float().abs().amax(dim=-1).clamp(min=1e-12) / 127
            tensors[name] = (value.float() / scale.unsqueeze(-1)).round().to(torch.int8).contiguous()
            tensors[name + SCALE] = scale.contiguous()
        else:
            tensors[name] = value.to(torch.bfloat16).contiguous()
    if vocabulary is not None:
        tensors[VOCABULARY] = vocabulary.to("cpu", torch.int32)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    card.write(directory)


def parameters_of(module: DraftingModule | PublicModule) -> Mapping[str, Tensor]:
    """The parameters of a module by name."""
    return module.tensors if isinstance(module, PublicModule) else module.state_dict()


def with_parameters(module: ModuleType, parameters: Mapping[str, Tensor]) -> ModuleType:
    """A module like this one with other parameters, in the data types and on the device of its own."""
    if isinstance(module, PublicModule):
        return replace(module, tensors={name: parameters[name].to(own) for name, own in module.tensors.items()})
    filled = deepcopy(module)
    filled.load_state_dict(dict(parameters))
    return filled


def save_with_parameters(source: Path, directory: Path, parameters: Mapping[str, Tensor]) -> None:
    """Write the draft in `source`, in its format and with other parameters, into an existing directory.

    They are stored in bfloat16. Its card, configurations and tokenizer, and its vocabulary or own ends, are copied.
    Raises `OSError` and `ModelLoadError`.
    """
    parameters = with_stored_names(source, parameters)
    stored, others = _what_stays(source, parameters)
    for file in _copied_files(source):
        shutil.copyfile(file, directory / file.name)
    with (directory / WEIGHTS).open("wb") as weights:
        write_tensors(weights, stored.tensors(others) | in_bfloat16(parameters), {"format": "pt"})


def saved_bytes(source: Path, parameters: Mapping[str, Tensor]) -> int:
    """Most bytes that `save_with_parameters` writes. Raises `OSError` and `ModelLoadError`."""
    parameters = with_stored_names(source, parameters)
    stored, others = _what_stays(source, parameters)
    own = sum(value.numel() for value in parameters.values()) * torch.bfloat16.itemsize
    header = (len(parameters) + len(others) + 1) * _ENTRY_BYTES
    return sum(file.stat().st_size for file in _copied_files(source)) + stored.stored_bytes(others) + own + header


def _what_stays(source: Path, parameters: Mapping[str, Tensor]) -> tuple[Checkpoint, list[str]]:
    """The draft in `source`, and the names of its tensors beside these parameters. Raises `ModelLoadError`."""
    stored = Checkpoint(source, {})
    if not stored.files:
        stored.fail("it has no weights")
    return stored, [name for name in stored.sizes if name.removesuffix(SCALE) not in parameters]


def _copied_files(source: Path) -> list[Path]:
    return [source / name for name in (EARLIER_CARD, CONFIG, *_BESIDE_WEIGHTS) if (source / name).is_file()]


def _fill(module: nn.Module, tensors: dict[str, Tensor], where: str) -> None:
    """Copy tensors into a module. Raises `ModelLoadError` unless names and shapes are the module's."""
    wanted = module.state_dict()
    if tensors.keys() != wanted.keys():
        missing, strange = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
        raise ModelLoadError(
            f"{where}: {WEIGHTS} lacks {shorten(missing[:3] or 'nothing')} and has {shorten(strange[:3] or 'nothing')} "
            f"in excess"
        )
    for name, value in wanted.items():
        found = tensors[name]
        if found.shape != value.shape or found.is_floating_point() != value.is_floating_point():
            raise ModelLoadError(f"{where}: {name} must be {list(value.shape)}, not {found.dtype} {list(found.shape)}")
    module.load_state_dict(tensors)
