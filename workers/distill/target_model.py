"""The frozen target of a training, as a model of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from cluster.core.errors import ModelLoadError
from workers.forward.native.build import processor_flags
from workers.model.complete_weights import load_complete


def load_target(
    directory: Path, device: torch.device, dtype: torch.dtype | Literal["auto"] = torch.float32
) -> PreTrainedModel:
    """Load the frozen target with PyTorch's attention; `auto`: in the type of its files. Raises `ModelLoadError`."""
    return _load(AutoModelForCausalLM, directory, device, dtype, attn_implementation="sdpa")


def load_seq2seq_target(directory: Path, device: torch.device) -> PreTrainedModel:
    """Load the frozen encoder-decoder target in float32. Raises `ModelLoadError`."""
    return _load(AutoModelForSeq2SeqLM, directory, device, torch.float32)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions that multiply matrices of bfloat16: a GPU, or a CPU with AVX-512's or AMX's."""
    return device.type != "cpu" or not processor_flags().isdisjoint(("avx512_bf16", "amx_bf16"))


def device_name(device: torch.device) -> str:
    """What a training runs on, for the model card."""
    return torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


def _load(
    kind: Any, directory: Path, device: torch.device, dtype: torch.dtype | Literal["auto"], **options: Any
) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()
    try:
        options |= {"dtype": dtype, "use_safetensors": True, "device_map": {"": device}}
        target = load_complete(kind, directory, dequantizes=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"model directory {str(directory)!r} cannot be loaded: {error}") from error
    target.eval().requires_grad_(False)
    return target
