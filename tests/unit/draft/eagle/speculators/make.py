"""Writes the P-EAGLE head in `draft` and what the library `speculators` 0.9.0 computes with it.

Run it in an environment with that library: `python make.py [DIRECTORY]`, by default into its own folder. `make interop`
compares what it writes with what is stored.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.peagle import core
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

PLACE = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
DRAFT = PLACE / "draft"
VOCABULARY, HIDDEN, LENGTH, DEPTHS = 24, 16, 12, 4
LAYER = {"hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rope_theta": 500.0}

torch.manual_seed(0)
layers = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=256, **LAYER, **HEADS)
layers._attn_implementation = "eager"
verifier = VerifierConfig(name_or_path="tiny", architectures=["LlamaForCausalLM"])
proposal = GreedyTokenProposalConfig(speculative_tokens=DEPTHS)
config = PEagleSpeculatorConfig(
    transformer_layer_config=layers,
    draft_vocab_size=8,
    eagle_aux_hidden_state_layer_ids=[0, 1, 2],
    mask_token_id=VOCABULARY - 1,
    fc_norm=True,
    speculators_config=SpeculatorsConfig(
        algorithm="peagle", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    ),
)
model = core.PEagleDraftModel(config).float().eval()
tokens = torch.arange(0, VOCABULARY, 3)
with torch.no_grad():
    for value in model.parameters():
        noise = torch.randn_like(value)
        value.copy_(1 + 0.2 * noise if value.dim() == 1 else noise * value.shape[-1] ** -0.5)
    model.t2d[tokens] = True
    model.d2t.copy_(tokens - torch.arange(len(tokens)))
model.save_pretrained(DRAFT)
for file in DRAFT.glob("*.py"):
    file.unlink()  # copies of the library's own files, which no reader needs

anchors = torch.tensor([*range(LENGTH), *[LENGTH - 1] * (DEPTHS - 1)])  # all of the text, then one chain of mask tokens
depths = torch.tensor([*[0] * LENGTH, *range(1, DEPTHS)])
core.generate_cod_sample_indices = lambda **_: (anchors, depths)
rows = LENGTH + DEPTHS - 1
taps, following = torch.randn(1, rows, 3 * HIDDEN), torch.randint(0, VOCABULARY, (1, rows))
shown: list[torch.Tensor] = []
model.lm_head.register_forward_hook(lambda _, __, found: shown.append(found[0]))
try:
    with torch.no_grad():
        last = torch.randn(1, rows, HIDDEN)
        model(taps, following, torch.zeros_like(following), verifier_last_hidden_states=last)
except RuntimeError as error:  # the loss needs a GPU; the pass before it does not
    print(error)
found = {"taps": taps[0, :LENGTH], "following": following[0, :LENGTH], "logits": shown[0]}
save_file({name: value.detach().clone().contiguous() for name, value in found.items()}, PLACE / "expected.safetensors")
