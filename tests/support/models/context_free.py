"""A target whose distribution hardly depends on the text, so that an untrained drafting module predicts it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.support.models import tiny
from tests.support.models.drafting_modules import CPU, card_for
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


def save_untrained(target: Path, directory: Path, kind: str, taps: tuple[int, ...], shape: Shape) -> Path:
    """Save a module as training begins with it: it predicts at every depth what the target's own head would."""
    directory.mkdir(parents=True, exist_ok=True)
    card = card_for(target, kind, taps, shape=shape)
    module = make_module(load_ends(target, card, None, torch.float32, CPU), shape, taps)
    save_drafter(directory, card, module, None)
    return directory
