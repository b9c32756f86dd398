"""Reads the tensors of a GGUF file by the names that `transformers` gives to parameters, as they are stored."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from cluster.core.errors import ModelLoadError
from workers.forward.weights.base import CutRefused, NoGpuProduct, Storage
from workers.forward.weights.gguf import gguf_storage, joined_storage
from workers.model.gguf_header import read_gguf
from workers.model.stored.parts import Region, nbytes_of

_ROTATED = ("self_attn.q_proj", "self_attn.k_proj")
_READ_BYTES = 1 << 22
"""About how many bytes of a matrix are read at a time: unpacking takes several times as many."""


@dataclass(frozen=True, slots=True)
class _Architecture:
    """How a file of an architecture differs from the model of `transformers`."""

    is_rotated: bool = False
    """Whether each head's queries and keys alternate between both halves of a rotation."""
    norm_offset: float = 0.0
    """What the file adds to the weights of norms."""


_ARCHITECTURES = {
    "llama": _Architecture(is_rotated=True),  # mistral's, too
    "qwen2": _Architecture(),
    "qwen3": _Architecture(),
    "phi3": _Architecture(),
    "gemma3": _Architecture(norm_offset=1.0),
}


class GgufFile:
    """A GGUF file, or all parts of a divided one. Headers are mapped into memory.

    Matrices are read one by one; none is de-quantized.
    """

    def __init__(self, path: Path, dtype: torch.dtype | None = None) -> None:
        """`dtype` is that of plain matrices, the file's own by default.

        Raises `ModelLoadError` for a file that cannot be read, or of an unknown architecture.
        """
        try:
            self._reader = read_gguf(path)
            name = self._field("general.architecture")
        except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
            raise ModelLoadError(f"GGUF file {str(path)!r} cannot be read: {error}") from error
        if name not in _ARCHITECTURES:
            raise ModelLoadError(
                f"GGUF file {str(path)!r}: architecture {name!r} is not read as it is stored; "
                f"it must be one of {', '.join(_ARCHITECTURES)}, or target.quantization must be none"
            )
        self.path = path
        self._dtype = dtype
        self._architecture = _ARCHITECTURES[name]
        kind = next(kind for kind, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
        self._names = gguf.get_tensor_name_map(kind, int(self._field(f"{name}.block_count")))
        heads = self._field(f"{name}.attention.head_count")
        self._heads = int(heads)
        self._kv_heads = int(self._field(f"{name}.attention.head_count_kv", heads))
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def __contains__(self, parameter: str) -> bool:
        return self._find(parameter) is not None

    def matrix(self, parameter: str, shape: tuple[int, int] | None = None, region: Region | None = None) -> Storage:
        """The matrix of a parameter, as `model.layers.0.mlp.up_proj.weight`, or a region of it.

        `shape` is what it must have. Raises `ModelLoadError`, and `CutRefused` for a region that cuts a group.
        """
        tensor = self._required(parameter)
        inputs, outputs = (int(size) for size in tensor.shape)  # the innermost first
        if shape is not None and (outputs, inputs) != tuple(shape):
            found = [outputs, inputs]
            raise ModelLoadError(f"GGUF file {str(self.path)!r}: {parameter!r} is {found}; it must be {[*shape]}")
        own = Region.whole((outputs, inputs)) if region is None else region
        places = torch.arange(outputs)
        for name, heads in zip(_ROTATED, (self._heads, self._kv_heads), strict=True):
            if self._architecture.is_rotated and name in parameter:
                places = _unrotated(outputs, heads)
        return self._read(tensor, places[own.outputs], own.inputs)

    def _read(self, tensor: Any, places: torch.Tensor, inputs: slice) -> Storage:
        """Some inputs of the outputs at `places`, int64 `[out]`. Only these outputs are read, a few at a time.

        They are read, not mapped: a mapping counts as memory of this process. Raises `ModelLoadError`, `CutRefused`.
        """
        block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        row = int(tensor.shape[0]) // block * size
        first, last = inputs.start // block, -(-inputs.stop // block)
        within = slice(inputs.start - first * block, inputs.stop - first * block)
        is_cut = (inputs.start, inputs.stop) != (0, int(tensor.shape[0]))
        kind = tensor.tensor_type.name

        def parts(opened: BufferedReader) -> Iterator[Storage]:
            for some in torch.split(places, max(1, _READ_BYTES // row)):
                low, high = (int(some.min()), int(some.max()) + 1) if len(some) else (0, 1)
                raw = np.empty((high - low, row), dtype=np.uint8)
                opened.seek(tensor.data_offset + low * row)
                if opened.readinto(raw.data) != raw.nbytes:
                    raise ValueError("the file ends within it")
                own = torch.from_numpy(raw)[some - low, first * size : last * size]
                part = gguf_storage(kind, own, self._dtype)
                yield part.take_inputs(within) if is_cut else part

        try:
            with open(tensor.data.filename, "rb") as opened:  # the part of a divided model that has it
                if is_cut:  # says which inputs it refuses
                    self._zeros(tensor).take_inputs(inputs)
                return joined_storage(parts(opened), len(places))
        except CutRefused:
            raise
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"GGUF file {str(self.path)!r}: tensor {tensor.name!r}: {error}") from error

    def vector(self, parameter: str) -> torch.Tensor:
        """A vector, float32, as the model of `transformers` has it. Raises `ModelLoadError`."""
        tensor = self._required(parameter)
        values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        is_rotated = self._architecture.is_rotated and parameter.endswith(".bias")
        for name, heads in zip(_ROTATED, (self._heads, self._kv_heads), strict=True):
            if is_rotated and name in parameter:
                return values[_unrotated(len(values), heads)]
        return values - self._architecture.norm_offset if "norm" in parameter else values.clone()

    def plain(self, parameter: str) -> torch.Tensor:
        """A parameter, float32, as the model of `transformers` has it. Raises `ModelLoadError`."""
        is_vector = len(self._required(parameter).shape) == 1
        return self.vector(parameter) if is_vector else self.matrix(parameter).dequantized().float()

    def sizes(self, *, on_gpu: bool = False) -> dict[str, int]:
        """Bytes of each tensor in memory, by the file's names; `on_gpu`: as it is multiplied on a GPU.

        Raises `ModelLoadError`.
        """
        return {name: self._nbytes(tensor, on_gpu) for name, tensor in self._tensors.items()}

    def gpu_problem(self) -> str:
        """Why GPUs do not multiply with the quantized matrices as they are stored; empty if they do."""
        matrices = (tensor for tensor in self._tensors.values() if len(tensor.shape) > 1)
        for tensor in {(one.tensor_type, int(one.shape[0])): one for one in matrices}.values():
            try:
                if (storage := self._zeros(tensor)).is_widened:  # torch multiplies others as they are
                    storage.words()
            except NoGpuProduct as error:
                return f"GPUs have no product for {tensor.name} ({tensor.tensor_type.name}): {error}"
        return ""

    def kind_of(self, parameter: str) -> str:
        """The type that the file has a matrix in. Raises `ModelLoadError`."""
        return str(self._required(parameter).tensor_type.name)

    def _nbytes(self, tensor: Any, on_gpu: bool) -> int:
        if len(tensor.shape) < 2:
            return int(tensor.n_elements) * (self._dtype or torch.float32).itemsize
        try:
            return nbytes_of(self._zeros(tensor), int(tensor.shape[1]), on_gpu=on_gpu)
        except ValueError as error:
            raise ModelLoadError(f"GGUF file {str(self.path)!r}: tensor {tensor.name!r}: {error}") from error

    def _zeros(self, tensor: Any) -> Storage:
        """One output of zeros in the type of a matrix."""
        block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        row = torch.zeros(1, int(tensor.shape[0]) // block * size, dtype=torch.uint8)
        return gguf_storage(tensor.tensor_type.name, row, self._dtype)

    def _find(self, parameter: str) -> Any:
        stem, _, suffix = parameter.rpartition(".")
        name = self._names.get_name(stem)
        return None if name is None else self._tensors.get(f"{name}.{suffix}")

    def _required(self, parameter: str) -> Any:
        tensor = self._find(parameter)
        if tensor is None:
            raise ModelLoadError(f"GGUF file {str(self.path)!r}: there is no tensor for {parameter!r}")
        return tensor

    def _field(self, name: str, default: Any = None) -> Any:
        field = self._reader.fields.get(name)
        if field is None and default is None:
            raise KeyError(f"no field {name}")
        return default if field is None else field.contents()


def _unrotated(outputs: int, heads: int) -> torch.Tensor:
    """Where the outputs of `transformers` are in the file: first half and second half of a head alternate there."""
    return torch.arange(outputs).view(heads, -1, 2).transpose(1, 2).flatten()
