"""The device of a rank, and whether the CPU kernels may compute there.

It imports no `transformers`, so that a process that finds packed weights starts without it.
"""

from __future__ import annotations

import torch

from cluster.core.config.model_section import ModelSection
from cluster.core.errors import ConfigurationError


def choose_device(wanted: str, rank: int) -> torch.device:
    """The device of a rank. Raises `ConfigurationError` if CUDA is configured and absent."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigurationError("device: cuda is refused; torch finds no CUDA device")
    # Ray shows each rank only its own GPUs. A rank that sees all GPUs takes the one of its number.
    return torch.device("cuda", rank % torch.cuda.device_count())


def may_be_native(section: ModelSection, device: torch.device, ranks: int) -> bool:
    """Whether the CPU kernels may compute the layers."""
    return section.native == "auto" and section.compile != "on" and device.type == "cpu" and ranks == 1
