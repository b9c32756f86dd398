"""Writes a DFlash drafter under its authors' names, and what the DFlash of `transformers` 5.24.0 computes with it.

Run it in an environment with that library: `python make_dflash.py [DIRECTORY]`, by default into its own folder. The
target's embedding is `sin` of each number. `make interop` compares what it writes with what is stored.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

PLACE = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
VOCABULARY, HIDDEN, SLOTS, LENGTH, TAPS = 24, 16, 4, 16, 3
SHAPE = {"hidden_size": HIDDEN, "intermediate_size": 24, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 256}
LAYERS = {"layer_types": ["full_attention"] * 2}
NAMES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}

torch.manual_seed(0)
rope = {"rope_theta": 500.0, "rope_type": "default"}
config = MuseGlimmerAssistantConfig(
    rope_parameters=rope, target_layer_ids=list(range(TAPS)), block_size=SLOTS, **SHAPE, **HEADS, **LAYERS
)
config._attn_implementation = "eager"
model = MuseGlimmerAssistantModel(config).float().eval()
with torch.no_grad():
    for value in model.parameters():
        noise = torch.randn_like(value)
        value.copy_(1 + 0.2 * noise if value.dim() == 1 else noise * value.shape[-1] ** -0.5)
    embedding = torch.arange(VOCABULARY * HIDDEN).view(VOCABULARY, HIDDEN).sin()
    taps, text = torch.randn(LENGTH, TAPS * HIDDEN), torch.randint(0, VOCABULARY - 1, (LENGTH,))
    anchors = [3, 7, 11]
    blocks = []
    for anchor in anchors:
        slots = torch.full((SLOTS,), VOCABULARY - 1)
        slots[0] = text[anchor]
        blocks.append(model(embedding[slots][None], taps[None, :anchor]).last_hidden_state[0])

(PLACE / "draft").mkdir(exist_ok=True)
tensors = {}
for name, value in model.state_dict().items():
    start = next((one for one in NAMES if name.startswith(one)), "")
    tensors[NAMES.get(start, "") + name.removeprefix(start)] = value.contiguous()
save_file(tensors, PLACE / "draft" / "model.safetensors")
authors = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "rope_theta": rope["rope_theta"],
    "block_size": SLOTS,
    "num_target_layers": 8,
    "dflash_config": {"mask_token_id": VOCABULARY - 1, "target_layer_ids": [-1, 0, 1]},
}
(PLACE / "draft" / "config.json").write_text(json.dumps(authors | SHAPE | HEADS | LAYERS, indent=2) + "\n")
indices = torch.tensor(anchors)[:, None] + torch.arange(SLOTS)
found = {"taps": taps, "tokens": text, "indices": indices.flatten(), "hidden": torch.cat(blocks)[None]}
save_file(found, PLACE / "expected.safetensors")
