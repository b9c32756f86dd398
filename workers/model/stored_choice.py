"""Whether `target.quantization: auto` keeps a model's weights as they are stored. Only headers and samples are read."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from cluster.core.config.model_section import DTYPE_BYTES
from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError, ModelLoadError
from workers.model.devices import choose_device
from workers.model.gguf_header import parts_of
from workers.model.stored.quantized_checkpoint import FORMATS, quantization_of, stored_checkpoint
from workers.model.stored.source import stored_alone, stored_file
from workers.model.target_ends import read_config
from workers.model.weight_counts import count_weights
from workers.model.weight_files import weight_files

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoredChoice:
    """What `auto` chooses for a model."""

    is_kept: bool
    """Whether its weights stay as they are stored."""
    refusal: str = ""
    """Why weights that are stored quantized do not stay so; empty for others."""


def choose_stored(section: TargetSection, directory: Path, *, on_gpu: bool) -> StoredChoice:
    """What `auto` chooses for the model in a directory, on a GPU or on a CPU, with the ranks of the section.

    Weights are kept if they are in a format that is read as it is stored, the family and the groups can be divided for
    the ranks, and the device has a product for each matrix.
    """
    if section.load_format != "auto" or not _has_stored_weights(directory):
        return StoredChoice(is_kept=False)
    if section.tensor_parallel > 1:
        from workers.model.sharding import check_divisible  # imports transformers, which plain weights do not need

        try:
            check_divisible(read_config(directory), section.tensor_parallel)
        except (ConfigurationError, ModelLoadError):  # loading refuses the ranks with plain weights, too
            return StoredChoice(is_kept=True)
    refusal = _refusal(section, directory, on_gpu)
    return StoredChoice(is_kept=not refusal, refusal=refusal)


def settled(section: TargetSection) -> TargetSection:
    """The section of a model in a directory with another `quantization` than `auto`. A line says what is refused."""
    if section.quantization != "auto":
        return section
    directory = Path(section.path)
    choice = choose_stored(section, directory, on_gpu=choose_device(section.device, 0).type != "cpu")
    if choice.refusal:
        logger.warning("%s", refusal_line(section, directory, directory, choice.refusal))
    return section.model_copy(update={"quantization": "stored" if choice.is_kept else "none"})


def refusal_line(section: TargetSection, directory: Path, plain: Path, refusal: str) -> str:
    """Say why the weights in a directory are de-quantized to those in `plain`, and how many bytes these take."""
    source = None if quantization_of(directory) is not None else stored_file(directory)
    files = weight_files(directory) if source is None else parts_of(source)
    stored, needed = sum(file.stat().st_size for file in files), count_weights(plain).parameters
    return (
        f"{section.path}: its weights are de-quantized and take {needed * DTYPE_BYTES[section.dtype] / 1e9:.3g} GB in "
        f"{section.dtype} instead of {stored / 1e9:.3g} GB as they are stored: {refusal}"
    )


def _has_stored_weights(directory: Path) -> bool:
    """Whether weights are quantized in a format that is read as it is stored, or only in a GGUF file."""
    settings = quantization_of(directory)
    if settings is not None:
        return str(settings.get("quant_method")) in FORMATS
    return stored_alone(directory) is not None


def _refusal(section: TargetSection, directory: Path, on_gpu: bool) -> str:
    """Why loading would refuse the weights as they are stored; empty if it would not."""
    from workers.model.rank_bytes import rank_bytes  # imports transformers

    ranks, whole_experts = section.tensor_parallel, section.enable_expert_parallel
    try:
        found = rank_bytes(directory, section.dtype, ranks, on_gpu=on_gpu, expert_parallel=whole_experts)
        checkpoint = stored_checkpoint(directory, getattr(torch, section.dtype))
    except (ConfigurationError, ModelLoadError) as error:
        return str(error)
    except Exception as error:  # code of a family that nobody has seen may raise anything
        return f"it cannot be read: {type(error).__name__}: {error}"
    if found is None or checkpoint is None:
        return "it is no decoder that reads and writes text alone"
    if not on_gpu:
        return ""
    if (problem := checkpoint.gpu_problem()) or find_spec("triton") is not None:
        return problem
    return "GPUs multiply stored weights with the package triton, which is not installed"
