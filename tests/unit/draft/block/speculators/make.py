"""Writes small drafters, and what the library `speculators` 0.9.0 computes with them.

Run it in an environment with that library: `python make.py dspark` writes into this folder, `python make.py dflash`
and `dflash2` into folders of these names; a second argument names another folder. The target's embedding is `sin` of
each element's number. `make interop` compares what it writes with what is stored.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

KIND = sys.argv[1]
IS_SPARK = KIND == "dspark"
PLACE = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / ("" if IS_SPARK else KIND)
DRAFT = PLACE / "draft"
VOCABULARY, HIDDEN, SLOTS, LENGTH = 24, 16, 4, 16
LAYER = {"hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rope_theta": 500.0}

torch.manual_seed(0)
layers = Qwen3Config(vocab_size=VOCABULARY, max_position_embeddings=256, **LAYER, **HEADS)
layers._attn_implementation = "eager"
verifier = VerifierConfig(name_or_path="tiny", architectures=["LlamaForCausalLM"])
proposal = GreedyTokenProposalConfig(speculative_tokens=SLOTS if IS_SPARK else SLOTS - 1)
common: dict[str, Any] = {
    "transformer_layer_config": layers,
    "block_size": SLOTS,
    "aux_hidden_state_layer_ids": [0, 1, 2],
    "mask_token_id": VOCABULARY - 1,
    "speculators_config": SpeculatorsConfig(
        algorithm=KIND, proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    ),
}
if IS_SPARK:
    spark = DSparkSpeculatorConfig(draft_vocab_size=8, markov_rank=4, markov_head_type="gated", **common)
    model: Any = DSparkDraftModel(spark).float().eval()
elif KIND == "dflash":
    model = DFlashDraftModel(DFlashSpeculatorConfig(draft_vocab_size=VOCABULARY, **common)).float().eval()
else:
    second = {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 5}
    model = DFlash2DraftModel(DFlash2SpeculatorConfig(draft_vocab_size=VOCABULARY, **second, **common)).float().eval()
with torch.no_grad():
    for value in model.parameters():
        noise = torch.randn_like(value)
        value.copy_(1 + 0.2 * noise if value.dim() == 1 else noise * value.shape[-1] ** -0.5)
    model.embed_tokens.weight.copy_(torch.arange(VOCABULARY * HIDDEN).view(VOCABULARY, HIDDEN).sin())
    if IS_SPARK:
        tokens = torch.arange(0, VOCABULARY, 3)
        model.t2d[tokens] = True
        model.d2t.copy_(tokens - torch.arange(len(tokens)))
model.save_pretrained(DRAFT)
(DRAFT / "config.py").unlink()  # a copy of the library's own file, which no reader needs

taps, text = torch.randn(1, LENGTH, 3 * HIDDEN), torch.randint(0, VOCABULARY - 1, (1, LENGTH))
shown: dict[str, torch.Tensor] = {"taps": taps[0], "tokens": text[0]}
backbone = model._backbone_forward


def seen_backbone(*args: Any, **given: Any) -> Any:
    found = backbone(*args, **given)
    shown.update(hidden=found[0], logits=found[1], indices=found[4])
    if KIND == "dflash2":
        before = model._predecessor_ids(text, found[4])
        candidates, scores = model.candidate_selector.select(found[1], found[0], before.reshape(1, -1))
        shown.update(before=before, candidates=candidates[0], scores=scores[0], head=model.lm_head.weight)
    return found


def seen_bias(**given: Any) -> Any:
    found = bias(**given)
    shown.update(bias=found, before=given["prev_token_ids"])
    return found


model._backbone_forward = seen_backbone
if IS_SPARK:
    bias, model.markov_head.block_bias = model.markov_head.block_bias, seen_bias
    model.confidence_head.register_forward_hook(lambda _, __, found: shown.update(confidence=found))
is_answer = torch.zeros(1, LENGTH)
is_answer[0, 3:10] = 1
try:
    with torch.no_grad():
        model(taps, text, is_answer, torch.randn(1, LENGTH, HIDDEN), torch.zeros_like(text), max_anchors=3)
except RuntimeError as error:  # the loss needs a GPU; the pass before it does not
    print(error)
save_file({name: value.detach().clone().contiguous() for name, value in shown.items()}, PLACE / "expected.safetensors")
