"""Writes the layer for multi-token prediction in `draft` and what the library `speculators` 0.9.0 computes with it.

Run it in an environment with that library: `python make_mtp.py [DIRECTORY]`, by default into its own folder. The
target's embedding is `sin` of each number, its head `cos`. `make interop` compares what it writes with what is stored.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp import MTPDraftModel
from speculators.models.mtp.config import MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

PLACE = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
VOCABULARY, HIDDEN, LENGTH, STEPS = 24, 16, 14, 3
LAYER = {"hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2, "tie_word_embeddings": False}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rope_theta": 500.0}

torch.manual_seed(0)
body = Qwen3Config(vocab_size=VOCABULARY, max_position_embeddings=256, **LAYER, **HEADS)
body._attn_implementation = "eager"
verifier = VerifierConfig(name_or_path="tiny", architectures=["Qwen3ForCausalLM"])
proposal = GreedyTokenProposalConfig(speculative_tokens=STEPS)
config = MTPSpeculatorConfig(
    transformer_layer_config=body,
    speculators_config=SpeculatorsConfig(
        algorithm="mtp", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    ),
)
model: Any = MTPDraftModel(config).float().eval()
with torch.no_grad():
    for name, value in model.named_parameters():
        if name.startswith("mtp_layers."):
            noise = torch.randn_like(value)
            value.copy_(1 + 0.2 * noise if value.dim() == 1 else noise * value.shape[-1] ** -0.5)
    numbers = torch.arange(VOCABULARY * HIDDEN).view(VOCABULARY, HIDDEN)
    model.embed_tokens.weight.copy_(numbers.sin())
    model.lm_head.weight.copy_(numbers.cos())
model.save_pretrained(PLACE / "draft")
(PLACE / "draft" / "config.py").unlink()  # a copy of the library's own file, which no reader needs

tokens, features = torch.randint(0, VOCABULARY, (LENGTH,)), torch.randn(LENGTH, HIDDEN)
with torch.no_grad():
    logits = model(tokens[None], features[None])[0]
found = {f"step_{step}": one[0].contiguous() for step, one in enumerate(logits)}
save_file({"tokens": tokens, "features": features, **found}, PLACE / "expected.safetensors")
