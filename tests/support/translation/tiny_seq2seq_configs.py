"""Configurations of tiny encoder-decoder models, and directories with random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, BartConfig, GenerationConfig, MarianConfig, PreTrainedConfig, T5Config

_SHAPE = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
}


def marian() -> PreTrainedConfig:
    """Sinusoidal positions, an offset per token in the logits, a forced end."""
    return MarianConfig(
        **_SHAPE,
        pad_token_id=95,
        eos_token_id=0,
        decoder_start_token_id=95,
        forced_eos_token_id=0,
        scale_embedding=True,
    )


def bart() -> PreTrainedConfig:
    """Learned positions, a norm after the embedding, a forced beginning."""
    return BartConfig(
        **_SHAPE,
        bos_token_id=3,
        pad_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_bos_token_id=3,
        forced_eos_token_id=2,
    )


def t5() -> PreTrainedConfig:
    """Relative positions, and a scaled output before a tied head."""
    return T5Config(
        vocab_size=96,
        d_model=32,
        d_kv=8,
        d_ff=40,
        num_layers=3,
        num_decoder_layers=3,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )


FAMILIES = {"marian": marian, "bart": bart, "t5": t5}


def save(directory: Path, config: PreTrainedConfig, seed: int = 0, sharpness: float = 4.0) -> Path:
    """Draw weights from `seed` and save the model. `sharpness` scales matrices, since random logits are nearly flat."""
    torch.manual_seed(seed)
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                parameter.mul_(sharpness)
        if getattr(model, "final_logits_bias", None) is not None:
            model.final_logits_bias.normal_()
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(directory)
    return directory
