"""Writes variants of a model for `pilotfish bench tasks`: quantized checkpoints, and scaled rotary positions.

    python -m tests.bench.checkpoints {gptq,compressed-tensors,yarn,linear} MODEL DIRECTORY

`DIRECTORY/NAME` is the variant, where `NAME` is that of the model: its packaged drafts then draft for the variant as
well. The quantization rounds each weight to the nearest value; the libraries of these formats choose better ones.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from deploy.settings import cache_directory
from tests.support.models import quantized
from workers.model.model_files import resolve_model_directory

BITS, GROUP = 4, 64
FACTOR = 2
"""By how much positions are scaled, and the context grows."""
_QUANTIZED: dict[str, tuple[quantized.Quantize, dict[str, Any]]] = {
    "gptq": (quantized.gptq(BITS, GROUP), {"quant_method": "gptq", "bits": BITS, "group_size": GROUP}),
    "compressed-tensors": (
        quantized.compressed_int8,
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 8, "symmetric": True, "strategy": "channel"}}},
        },
    ),
}
_SCALED = ("yarn", "linear")
VARIANTS = (*_QUANTIZED, *_SCALED)


def write(variant: str, source: Path, directory: Path) -> None:
    """Write the variant of the model in `source` as `directory`, which must not exist. One file holds the weights."""
    if variant in _SCALED:
        directory.mkdir(parents=True)
        shutil.copy(source / "model.safetensors", directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(_scaled(source, variant)), encoding="utf-8")
    else:
        directory.parent.mkdir(parents=True, exist_ok=True)
        quantize, settings = _QUANTIZED[variant]

        def single(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            return quantize(weight.float())

        quantized.save(source, directory, single, settings)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and not (directory / file.name).exists():
            shutil.copy(file, directory / file.name)


def _scaled(source: Path, kind: str) -> dict[str, Any]:
    """The model's configuration, with positions of `FACTOR` times its context."""
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    length = config["max_position_embeddings"]
    rope = config.get("rope_parameters", {}) | {"rope_type": kind, "factor": float(FACTOR)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = length
    return config | {"rope_parameters": rope, "max_position_embeddings": FACTOR * length}


def main() -> None:
    """Write the variant that the command line names."""
    if len(sys.argv) != 4 or sys.argv[1] not in VARIANTS:
        sys.exit(__doc__)
    variant, model, directory = sys.argv[1:]
    source = resolve_model_directory(model, cache_directory())
    write(variant, source, Path(directory, source.name))


if __name__ == "__main__":
    main()
