"""A target whose distribution hardly depends on the text, so that an untrained drafting module predicts it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from tests.support.models import tiny
from tests.support.models.drafting_modules import CPU, card_for
from tests.support.translation.tiny_marian import save_translator
from workers.model.draft_shapes import Shape
from workers.model.drafting.files import load_ends, make_module, save_drafter

_COMMON = 6.0
"""Value of the first component of every embedding; the others are small random numbers."""


def save_target(directory: Path, vocabulary_size: int) -> Path:
    """Save a tiny Llama whose layers add nothing to the embedding of the last token, which all tokens share mostly."""
    tiny.save(directory, tiny.llama(vocab_size=vocabulary_size))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        embedding = model.model.embed_tokens.weight
        embedding.copy_(0.05 * torch.randn(embedding.shape, generator=generator))
        embedding[:, 0] = _COMMON
        head = model.lm_head.weight
        head.copy_(0.3 * torch.randn(head.shape, generator=generator))
    model.save_pretrained(directory)
    return directory


def save_sourced_target(directory: Path, family: str) -> Path:
    """Save a tiny translator of a family whose decoder ends with the same hidden state everywhere."""
    save_translator(directory, family)
    model: Any = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    embedding, decoder = model.get_decoder().get_input_embeddings().weight, model.get_decoder()
    with torch.no_grad():
        embedding.copy_(0.3 * torch.randn(embedding.shape, generator=generator))
        if family.startswith("t5"):  # only the first component passes the final norm, and it is all that counts
            for name, parameter in decoder.named_parameters():
                if name.endswith((".o.weight", ".wo.weight")):
                    parameter.zero_()
            embedding.mul_(0.01)[:, 0] = 1 + torch.randperm(len(embedding), generator=generator) / 128
            decoder.final_layer_norm.weight.zero_()[0] = 12.0 if model.config.scale_decoder_outputs else 1.7
        else:
            norm = decoder.layers[-1].final_layer_norm
            norm.weight.zero_()
            norm.bias.copy_(torch.randn(norm.bias.shape, generator=generator).bfloat16())
    model.save_pretrained(directory)
    return directory


def save_untrained(target: Path, directory: Path, kind: str, taps: tuple[int, ...], shape: Shape) -> Path:
    """Save a module as training begins with it: it predicts at every depth what the target's own head would."""
    directory.mkdir(parents=True, exist_ok=True)
    card = card_for(target, kind, taps, shape=shape)
    module = make_module(load_ends(target, card, None, torch.float32, CPU), shape, taps)
    save_drafter(directory, card, module, None, target_directory=target)
    return directory
