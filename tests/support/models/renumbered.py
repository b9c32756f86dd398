"""A model with other numbers for the same pieces of text: it computes the same, and no token id means the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_ADDED = 8
"""Tokens without a text at the end of the other vocabulary, so that its size is another one, too."""
_PRINTABLE = range(0x20, 0x7F)


def renumber(source: Path, directory: Path) -> Path:
    """Save a copy of a tiny model of `tiny_tokenizer.byte_level` with other token ids."""
    shutil.copytree(source, directory)
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    pieces = content["model"]["vocab"]
    numbers = {old: len(pieces) - 1 - old for old in pieces.values()}
    content["model"]["vocab"] = {piece: numbers[old] for piece, old in pieces.items()}
    for added in content["added_tokens"]:
        added["id"] = numbers[added["id"]]
    file.write_text(json.dumps(content), encoding="utf-8")
    order = torch.tensor([old for old, _ in sorted(numbers.items(), key=lambda pair: pair[1])])
    weights = load_file(directory / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name][order], torch.zeros(_ADDED, weights[name].shape[1])])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    (directory / "config.json").write_text(json.dumps(config | {"vocab_size": len(order) + _ADDED}))
    return directory


def write_text_alone(directory: Path) -> None:
    """Make a tiny model write printable characters, by logits of 0 for all other tokens."""
    pieces = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    printable = [token for piece, token in pieces.items() if len(piece) == 1 and ord(piece) in _PRINTABLE]
    weights = load_file(directory / "model.safetensors")
    head = torch.zeros_like(weights["lm_head.weight"])
    head[printable] = weights["lm_head.weight"][printable]
    weights["lm_head.weight"] = head
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
