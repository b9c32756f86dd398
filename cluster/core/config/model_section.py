"""Settings of a model and of its KV pool, which the target and draft models share."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from cluster.core.config.base import MIB, UNSHARED, Choice, Section

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number in each format of `dtype`."""
USUAL_FRACTION, GPU_FRACTION = 0.1, 0.9
"""`memory_fraction` where it is unset: usually, and for a target on a GPU, which is there for it alone."""


class ModelSection(Section):
    """A model: its weights and how they are loaded."""

    path: Annotated[str, Field(min_length=1)] = "smollm2-135m-instruct"
    """Source of the weights: a directory, hub id, `.gguf` file or packaged name. For measurements, `PATH@x10` computes
    the same with 10 times the multiply-adds."""
    revision: str | None = None
    """Hub revision of `path`; unset takes the default branch. It has no effect on local files."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of weights, computation and KV cache."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` draws random weights in the shape of `config.json`, to measure speed where no weights are at hand. They
    are plain numbers, also for a quantized checkpoint."""
    device: Annotated[Literal["auto", "cpu", "cuda"], UNSHARED] = "auto"
    """Device that the model computes on; `auto` takes a GPU where one is free, else the CPU."""
    compile: Choice[Literal["off", "on", "auto"]] = "auto"
    """Whether layers are compiled at start; `auto` compiles in reduced precision unless Pilotfish's kernels apply."""
    native: Choice[Literal["auto", "off"]] = "auto"
    """`auto` computes supported model families on CPU with Pilotfish's kernels; `off` always runs PyTorch modules."""
    compile_directory: str | None = None
    """Directory for compiled code that is reused at the next start; unset takes a folder in Pilotfish's cache."""
    quantization: Literal["none", "int8", "int4", "stored"] = "none"
    """`int8` and `int4` round linear layers to 8 or 4 bits; `stored` keeps a checkpoint's bits."""

    @model_validator(mode="after")
    def _check_drawn(self) -> Self:
        if self.load_format == "dummy" and self.quantization == "stored":
            others = [name for name in get_args(type(self).model_fields["quantization"].annotation) if name != "stored"]
            raise ValueError(
                "quantization (stored) is refused with load_format (dummy), which draws plain weights; it must be one "
                f"of {', '.join(others)}"
            )
        return self


class PoolSection(Section):
    """The paged KV cache of one worker."""

    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    """Number of tokens in one KV block."""
    pool_bytes: Annotated[int, Field(ge=MIB)] | None = None
    """Size of the KV pool of each rank, in bytes; unset computes it from `memory_fraction`."""
    memory_fraction: Annotated[float, Field(gt=0, le=0.95)] | None = None
    """Share of the free memory after loading that the KV pool takes when `pool_bytes` is unset. On a GPU, memory for
    CUDA graphs and activations does not count as free. Unset: 0.1, and 0.9 for a target on a GPU."""
    window: Annotated[int, Field(ge=16)] | None = None
    """LOSSY: layers of full attention see only the last `window` tokens and the first `sinks` ones; unset: all."""
    sinks: Annotated[int, Field(ge=0, le=256)] = 4
    """Number of first tokens that stay visible when `window` is set (attention sinks)."""
