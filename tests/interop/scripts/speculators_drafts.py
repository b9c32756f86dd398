"""Loads drafts with the library `speculators` and writes what it computes with them. Runs in the library's environment.

    speculators_drafts.py DIRECTORY

The directory has a checkpoint `draft`, whose configuration names the target's directory, and `given.safetensors`:
`taps` [tokens, taps x hidden size] and `tokens` [tokens]. Writes `found.safetensors` there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from torch import Tensor

DEPTHS = 3
Found = dict[str, Tensor]


def loaded(model_class: Any, config_class: Any, draft: Path) -> Any:
    config = config_class.from_pretrained(draft)
    config.transformer_layer_config._attn_implementation = "eager"
    return model_class.from_pretrained(draft, config=config, dtype=torch.float32).eval()


def eagle3(draft: Path, given: Found) -> Found:
    """Logits of each depth of the training-time test. The input at a position is its taps and the token after it."""
    model = loaded(Eagle3DraftModel, Eagle3SpeculatorConfig, draft)
    shown: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _, __, logits: shown.append(logits[0]))
    following = given["tokens"][None, 1:]
    with torch.no_grad():
        model(given["taps"][None], following, torch.zeros_like(following), ttt_steps=DEPTHS)
    return {f"depth_{depth}": logits for depth, logits in enumerate(shown)}


def dspark(draft: Path, given: Found) -> Found:
    """Vectors and logits of blocks, what the Markov head adds to them, and the confidences' logits."""
    model = loaded(DSparkDraftModel, DSparkSpeculatorConfig, draft)
    shown: Found = {}
    backbone, bias = model._backbone_forward, model.markov_head.block_bias

    def seen_backbone(*args: Any, **keywords: Any) -> Any:
        found = backbone(*args, **keywords)
        shown.update(hidden=found[0], logits=found[1], indices=found[4])
        return found

    def seen_bias(**keywords: Any) -> Any:
        found = bias(**keywords)
        shown.update(bias=found, before=keywords["prev_token_ids"])
        return found

    model._backbone_forward, model.markov_head.block_bias = seen_backbone, seen_bias
    model.confidence_head.register_forward_hook(lambda _, __, found: shown.update(confidence=found))
    taps, text = given["taps"][None], given["tokens"][None]
    is_answer = torch.zeros(text.shape)
    is_answer[0, 3:10] = 1
    last = torch.zeros(1, text.shape[1], model.lm_head.in_features)
    try:
        with torch.no_grad():
            model(taps, text, is_answer, last, torch.zeros_like(text), max_anchors=3)
    except RuntimeError as error:  # the loss needs a GPU; the pass before it does not
        print(error, file=sys.stderr)
    return shown


def main() -> None:
    torch.manual_seed(0)
    directory = Path(sys.argv[1])
    given = load_file(directory / "given.safetensors")
    found = (eagle3 if "eagle3" in directory.name else dspark)(directory / "draft", given)
    plain = {name: value.detach().clone().contiguous() for name, value in found.items()}
    save_file(plain, directory / "found.safetensors")


if __name__ == "__main__":
    main()
