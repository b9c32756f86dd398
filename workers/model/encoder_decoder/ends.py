"""Reads the parts of an encoder-decoder target that heads share with it: the decoder's embedding, its end, the head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig

from cluster.core.errors import ModelLoadError
from workers.forward.encoder_decoder.decoder import logits_scale
from workers.model.target_ends import read_tensors
from workers.model.weight_files import weight_files

_FINAL_NORM = "final_layer_norm"
"""The RMS norm behind T5's last decoder layer."""
_OTHER_NORM = "layer_norm"
"""The norm behind the last decoder layer of mBART and Pegasus, which has a bias."""
_NORMED_LAST = "BigBirdPegasusDecoder"
"""The class of a decoder whose norm called `layernorm_embedding` is behind its last layer."""
_LOGITS_BIAS = "final_logits_bias"


@dataclass(frozen=True, slots=True)
class DecoderEnds:
    """The ends of a decoder."""

    embedding: torch.Tensor
    """[tokens, hidden size]."""
    head: torch.Tensor
    """[tokens, hidden size]; a factor on hidden states (T5) or logits (Granite) is multiplied into it."""
    norm: torch.Tensor | None
    """[hidden size] Weights of an RMS norm; `None` where the last layer's output goes to the head, as in Marian."""
    epsilon: float
    """The value that the RMS norm `norm` adds to the mean of squares before the root."""
    bias: torch.Tensor | None
    """[tokens] What is added to the logits, float32; `None`: nothing."""


def read_decoder_ends(directory: Path, config: PreTrainedConfig) -> DecoderEnds:
    """Read the ends of the model in `directory`.

    Raises `ModelLoadError` for a tensor that is missing, and for a decoder that ends with a norm other than an RMS
    norm.
    """
    with torch.device("meta"):
        model: Any = AutoModelForSeq2SeqLM.from_config(config)
    decoder = model.get_decoder()
    if hasattr(decoder, _OTHER_NORM) or type(decoder).__name__ == _NORMED_LAST:
        raise ModelLoadError(
            f"target directory {str(directory)!r}: the decoder of model type {config.model_type!r} ends with a norm "
            "other than an RMS norm; needed T5, Marian or BART"
        )
    stored = {name: values for file in weight_files(directory) for name, values in read_tensors(file).items()}

    def read(weight: torch.Tensor) -> torch.Tensor:
        """The stored tensor of a parameter: tied ones are stored under one of their names."""
        names = [name for name, value in model.named_parameters(remove_duplicate=False) if value is weight]
        found = next((stored[name] for name in names if name in stored), None)
        if found is None or found.shape != weight.shape:
            raise ModelLoadError(
                f"target directory {str(directory)!r}: its safetensors hold no {names[0]} of shape {list(weight.shape)}"
            )
        return found

    head = read(model.get_output_embeddings().weight)
    scale = logits_scale(model)
    if scale is not None:
        head = head.float() * scale
    norm = getattr(decoder, _FINAL_NORM, None)
    bias = stored.get(_LOGITS_BIAS)
    return DecoderEnds(
        embedding=read(decoder.get_input_embeddings().weight),
        head=head,
        norm=None if norm is None else read(norm.weight),
        epsilon=0.0 if norm is None else float(norm.variance_epsilon),
        bias=bias.float().flatten() if bias is not None and bool(bias.any()) else None,
    )
