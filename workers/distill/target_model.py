"""The frozen target of a training, as a model of `transformers`."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from cluster.core.errors import ModelLoadError


def load_target(directory: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load the frozen target with PyTorch's attention. Raises `ModelLoadError`."""
    transformers_logging.disable_progress_bar()
    try:
        target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            device_map={"": device},
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"model directory {str(directory)!r} cannot be loaded: {error}") from error
    target.eval().requires_grad_(False)
    return target
