"""Writes checkpoints with quantized weights as plain ones.

The weights are de-quantized once, so no library of the format is needed, every device serves the model, and it may be
quantized again with `quantization: int8`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from workers.model.stored.quantized_checkpoint import QuantizedCheckpoint


def dequantize(directory: Path, destination: Path) -> None:
    """Write the model in `directory` to `destination` with plain weights, in the type that its configuration states.

    Raises `ModelLoadError`, which names the tensor, where the checkpoint is not what its configuration says.
    """
    weight_map: dict[str, str] = {}
    source = QuantizedCheckpoint(directory)
    for file, names in source.files.items():
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            weight = source.matrix_of(name)
            if weight is None:
                tensors[name] = source.vector(name)
            elif weight not in weight_map and weight not in tensors:
                tensors[weight] = source.matrix(weight).dequantized().to(source.plain_dtype(weight))
        save_file(tensors, destination / file.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
    index = {"metadata": {}, "weight_map": weight_map}
    (destination / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for file in directory.iterdir():
        if file.is_file() and file.suffix in (".json", ".jinja", ".txt", ".model") and ".index." not in file.name:
            shutil.copy(file, destination / file.name)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (destination / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
