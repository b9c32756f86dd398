"""Checkpoints of one model in every format of stored weights, each beside its de-quantized weights in float32."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.support.models import quantized, stored_gguf
from workers.model.stored.source import write_stored_in

_GROUP, _BLOCK = 64, (64, 64)
"""Sizes that divide all matrices of the packaged models."""
_CHECKPOINTS = quantized.checkpoints(_GROUP, _BLOCK)
_GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
"""Types of GGUF that can be written. K-quants cannot, and the packaged gemma-3-270m has them."""
FORMATS = (*_CHECKPOINTS, *_GGUF)
USUAL = (
    *("awq", "gptq 3 bits", "gptq 4 bits", "gptq 8 bits", "gptq in activation order"),
    *("compressed-tensors 4 bits", "compressed-tensors 8 bits", "compressed-tensors int8"),
    *("bitsandbytes nf4", "bitsandbytes 8 bits", "fp8 in blocks", "fp8 per tensor", "fbgemm fp8 per channel"),
    *("Q4_0", "Q5_0", "Q5_1", "Q8_0"),
)
"""One format of each storage, in which others differ by names and the order of bits alone."""


@contextmanager
def written(source: Path, name: str) -> Iterator[tuple[Path, Path]]:
    """Inside, there are two directories: the model in `source` in a format, and its de-quantized weights in float32."""
    with TemporaryDirectory() as scratch:
        stored, plain = Path(scratch, "stored"), Path(scratch, "plain")
        plain.mkdir()
        shutil.copy(source / "config.json", plain)
        if name in _GGUF:
            tensors = _write_gguf(source, stored, Path(scratch, "model.gguf"), name)
        else:
            quantize, settings = _CHECKPOINTS[name]
            tensors = quantized.save(source, stored, lambda weight: quantize(weight.float()), settings)
        save_file({key: one.float().contiguous() for key, one in tensors.items()}, plain / "model.safetensors")
        yield stored, plain


def _write_gguf(source: Path, directory: Path, file: Path, kind: str) -> dict[str, torch.Tensor]:
    """Write the model to a GGUF file, and the directory that is made of it. Returns the de-quantized weights."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    architecture = model.config.model_type.removesuffix("_text")
    directory.mkdir()
    shutil.copy(source / "config.json", directory)
    tensors = stored_gguf.write(model, file, architecture, {}, default=kind)
    write_stored_in(directory, file)
    return tensors
