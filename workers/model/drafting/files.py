"""Files of drafting modules: a draft card, and one safetensors file with the module's own parameters.

A parameter is stored in bfloat16, or, for matrices of an int8 file, as int8 with a float32 scale for each row under
its name with `.scale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cluster.core.errors import ModelLoadError, shorten
from workers.model.distilled import draft_vocabulary
from workers.model.draft_card import CARD, LAYERS, VOCABULARY, WEIGHTS, DraftCard, read_card
from workers.model.draft_shapes import BlockShape, EagleShape, ExitShape, HeadsShape, Shape, TableShape
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.exit_norm import ExitNorm
from workers.model.drafting.heads import MedusaHeads
from workers.model.drafting.table import SuccessorTable
from workers.model.encoder_decoder.ends import DecoderEnds, read_decoder_ends
from workers.model.target_ends import read_shared_ends, read_target_config, read_tensors

_SCALE = ".scale"
_LEAST_INT8 = 65536
"""Elements from which a matrix of an int8 file is stored as int8."""

DraftingModule = MedusaHeads | BlockDrafter | EagleHead | ExitNorm | SuccessorTable


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafting module with the frozen ends of its target."""

    card: DraftCard
    ends: TargetEnds
    module: DraftingModule


def make_module(ends: TargetEnds, shape: Shape, taps: Sequence[int]) -> DraftingModule:
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
    directory: Path, target_directory: Path, dtype: torch.dtype, device: torch.device, kind: str | None = None
) -> Drafter:
    """Load a module from its own directory and the ends from its target's directory.

    `kind` is the kind that the caller needs. Raises `ModelLoadError`, which names the field or the tensor, if a
    directory does not match the card or the kind.
    """
    card = read_card(directory)
    where = f"draft directory {str(directory)!r}"
    if card.kind == LAYERS or card.shape is None or (kind is not None and card.kind != kind):
        raise ModelLoadError(f"{where}: kind is {card.kind!r} in {CARD}; needed {kind or 'a drafting module'}")
    tensors = read_tensors(directory / WEIGHTS)
    vocabulary = draft_vocabulary(directory, tensors.get(VOCABULARY), card)
    ends = load_ends(target_directory, card, vocabulary, dtype, device)
    module = make_module(ends, card.shape, card.taps)
    _fill(module, _restored(tensors), where)
    module.to(device=device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    module.eval().requires_grad_(False)
    return Drafter(card, ends, module)


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    """The parameters of a stored module by name, int8 matrices multiplied by their scales. Raises `ModelLoadError`."""
    return _restored(read_tensors(directory / WEIGHTS))


def load_ends(
    target_directory: Path, card: DraftCard, vocabulary: Tensor | None, dtype: torch.dtype, device: torch.device
) -> TargetEnds:
    """The ends of a target for a draft with this card. `vocabulary` [tokens], int64, reduces the head.

    Raises `ModelLoadError` for a target of other sizes, or whose final norm is neither a plain RMS norm nor missing.
    """
    config = read_target_config(target_directory, card)
    if config.is_encoder_decoder:
        return _reduced_ends(read_decoder_ends(target_directory, config), vocabulary, dtype, device)
    shared = read_shared_ends(target_directory, card)
    norm = shared.tensors.get(("norm", "weight"))
    if norm is None:
        raise ModelLoadError(
            f"target directory {str(target_directory)!r}: model type {shared.config.model_type!r} ends with a norm "
            f"other than a plain RMS norm, which drafting modules need"
        )
    embedding = shared.tensors["embedding", "weight"]
    head = shared.tensors.get(("head", "weight"), embedding)
    whole = DecoderEnds(embedding, head, norm, float(shared.config.rms_norm_eps), None)
    return _reduced_ends(whole, vocabulary, dtype, device)


def _reduced_ends(
    whole: DecoderEnds, vocabulary: Tensor | None, dtype: torch.dtype, device: torch.device
) -> TargetEnds:
    """The ends with the rows of `vocabulary` alone in the head and in the bias of the logits."""

    def reduced(values: Tensor) -> Tensor:
        rows = values if vocabulary is None else values[vocabulary.to(values.device)]
        return rows.to(device, dtype)

    return TargetEnds(
        whole.embedding.to(device, dtype),
        reduced(whole.head),
        None if whole.norm is None else whole.norm.to(device, dtype),
        float(whole.epsilon),
        vocabulary,
        None if whole.bias is None else reduced(whole.bias),
    ).to(device)


def save_drafter(
    directory: Path, card: DraftCard, module: nn.Module, vocabulary: Tensor | None, *, int8: bool = False
) -> None:
    """Write the card and the weights of a module into an existing directory."""
    tensors: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        value = value.detach().cpu()
        if not value.is_floating_point():
            tensors[name] = value.contiguous()
        elif int8 and value.dim() >= 2 and value.numel() >= _LEAST_INT8:
            scale = value.float().abs().amax(dim=-1).clamp(min=1e-12) / 127
            tensors[name] = (value.float() / scale.unsqueeze(-1)).round().to(torch.int8).contiguous()
            tensors[name + _SCALE] = scale.contiguous()
        else:
            tensors[name] = value.to(torch.bfloat16).contiguous()
    if vocabulary is not None:
        tensors[VOCABULARY] = vocabulary.to("cpu", torch.int32)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    card.write(directory)


def _restored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with int8 matrices multiplied by their scales."""
    restored: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.endswith(_SCALE) or name == VOCABULARY:
            continue
        scale = tensors.get(name + _SCALE)
        restored[name] = value if scale is None else value.float() * scale.unsqueeze(-1)
    return restored


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
