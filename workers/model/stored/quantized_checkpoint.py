"""Reads matrices of a directory of safetensors as they are stored: quantized in a known format, or plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open

from cluster.core.errors import ModelLoadError
from workers.forward.weights.base import CutRefused, NoGpuProduct, Storage
from workers.forward.weights.plain import PlainStorage
from workers.model.stored.awq import Awq
from workers.model.stored.bitsandbytes import BitsAndBytes
from workers.model.stored.compressed_tensors import compressed_tensors
from workers.model.stored.fp8 import Fp8
from workers.model.stored.gguf_file import GgufFile
from workers.model.stored.gptq import Gptq
from workers.model.stored.mxfp4 import BLOCK, ExpertRegion, Mxfp4, expert_storages
from workers.model.stored.parts import FLOATS, Parts, QuantizedFormat, Region, nbytes_of
from workers.model.stored.source import stored_file
from workers.model.weight_files import config_values, weight_files

FORMATS: Mapping[str, Callable[[Mapping[str, Any]], QuantizedFormat]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": compressed_tensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "mxfp4": Mxfp4,
}
"""What reads a checkpoint, by its `quantization_config.quant_method`."""
_BLOCKS = "_blocks"
"""Ends the names of the values of experts in MXFP4."""
SAMPLED_OUTPUTS = 128
"""Outputs that tell the bytes of a matrix: as many as a block of scales has."""
DEQUANTIZED = FORMATS.keys() - {"mxfp4"}
"""The methods whose checkpoints are written de-quantized for other quantizations; `transformers` reads the others."""


def quantization_of(directory: Path) -> dict[str, Any] | None:
    """The `quantization_config` of a model directory, or `None` for plain weights or an unreadable configuration."""
    found = config_values(directory).get("quantization_config")
    return found if isinstance(found, dict) else None


def is_dequantized(directory: Path) -> bool:
    """Whether a model directory has quantized weights that are de-quantized where plain ones are needed."""
    settings = quantization_of(directory)
    return settings is not None and str(settings.get("quant_method")) in DEQUANTIZED


def _split(name: str) -> tuple[str, str]:
    """A tensor's layer, and its own name within it: its last word, or `weight.absmax` and the like."""
    module, is_of_weight, rest = name.partition(".weight.")
    if is_of_weight:
        return module, f"weight.{rest}"
    module, _, word = name.rpartition(".")
    return module, word


class QuantizedCheckpoint:
    """The tensors of a directory. Matrices are read one by one, from files that are mapped for one only.

    A mapping counts as the memory of this process for as long as it lasts, so none is kept.
    """

    def __init__(self, directory: Path, dtype: torch.dtype | None = None) -> None:
        """`dtype` is that of plain matrices, the checkpoint's own by default. Only headers are read.

        Raises `ModelLoadError` for a method or for settings that are not read, and for files that are broken.
        """
        self.path = directory
        self._dtype = dtype
        settings = quantization_of(directory) or {}
        config = config_values(directory)
        self._stated = str(config.get("dtype") or config.get("torch_dtype") or "")
        method = str(settings.get("quant_method"))
        if method not in FORMATS:
            raise ModelLoadError(
                f"model directory {str(directory)!r}: quantization_config.quant_method is {method!r}; "
                f"weights are kept as they are stored for {', '.join(FORMATS)}"
            )
        try:
            self.format = FORMATS[method](settings)
            self.files: dict[Path, list[str]] = {}
            self._file_of: dict[str, Path] = {}
            for file in weight_files(directory):
                with safe_open(file, framework="pt") as opened:
                    self.files[file] = list(opened.keys())
                self._file_of |= dict.fromkeys(self.files[file], file)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"model directory {str(directory)!r} cannot be read: {error}") from error
        except ValueError as error:
            raise ModelLoadError(
                f"model directory {str(directory)!r}: weights of {method!r} are refused: quantization_config: {error}"
            ) from error
        self._words: dict[str, set[str]] = {}
        for name in self._file_of:
            module, word = _split(name)
            self._words.setdefault(module, set()).add(word)

    def __contains__(self, parameter: str) -> bool:
        return parameter in self._file_of or self.is_quantized(parameter)

    def is_quantized(self, parameter: str) -> bool:
        """Whether a parameter is the weight of a layer whose matrix is stored quantized."""
        module, _, word = parameter.rpartition(".")
        return word == "weight" and self.format.is_quantized(self._words.get(module, ()))

    def matrix_of(self, name: str) -> str | None:
        """The parameter of whose quantized matrix a tensor is a part; `None` for any other tensor."""
        module, word = _split(name)
        weight = f"{module}.weight"
        return weight if word in self.format.parts and self.is_quantized(weight) else None

    def plain_dtype(self, parameter: str) -> torch.dtype:
        """The type of a de-quantized matrix: that of the model's configuration, else that of the scales."""
        stated = getattr(torch, self._stated, None)
        if stated in FLOATS:
            return cast("torch.dtype", stated)
        module = parameter.rpartition(".")[0]
        name = next(f"{module}.{part}" for part in self.format.scales if part in self._words[module])
        scale = self._mapped(name).dtype
        return scale if scale in FLOATS else torch.float32

    def matrix(self, parameter: str, shape: tuple[int, int] | None = None, region: Region | None = None) -> Storage:
        """A parameter's matrix, or a region of it. `shape` is what it must have.

        Raises `ModelLoadError`, which names the tensor, and `CutRefused`.
        """
        module = parameter.rpartition(".")[0]
        if not self.is_quantized(parameter):
            tensor = self._plain(parameter)
            if tensor.dtype not in FLOATS:
                raise self._without_scale(parameter, tensor)
            self._check(parameter, tuple(tensor.shape), shape)
            kept = tensor if region is None else tensor[region.outputs, region.inputs]
            kept = kept.to(self._dtype or kept.dtype, copy=True, memory_format=torch.contiguous_format)
            return PlainStorage(kept)
        with self._naming(module):
            parts = self._parts(module, self._words[module] & self.format.parts)
            found = self.format.shape(parts)
            self._check(parameter, found, shape)
            return self.format.storage(parts, Region.whole(found) if region is None else region)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter; that of a quantized matrix is what it stands for. Raises `ModelLoadError`."""
        found: dict[str, tuple[int, ...]] = {}
        for name in self._file_of:
            parameter = self.matrix_of(name)
            if parameter is None:
                found[name] = tuple(self._plain(name).shape)
            elif parameter not in found:
                found[parameter] = self._quantized_shape(parameter)
        return found

    def sizes(self, *, on_gpu: bool = False) -> dict[str, int]:
        """Bytes of each parameter in memory; `on_gpu`: as it is multiplied on a GPU. A few outputs of each are read.

        Raises `ModelLoadError`.
        """
        found: dict[str, int] = {}
        known: dict[tuple[tuple[str, object], ...], int] = {}
        for name in self._file_of:
            parameter = self.matrix_of(name)
            if parameter is None:
                tensor = self._plain(name)
                kept = self._dtype or tensor.dtype if tensor.dtype in FLOATS else tensor.dtype
                found[name] = tensor.numel() * kept.itemsize
                if not on_gpu and name.endswith(_BLOCKS) and tensor.dim() == 4:  # their scales are wider on a CPU
                    found[name] = self._experts_nbytes(name.removesuffix(_BLOCKS), tensor) - tensor[..., 0].numel()
            elif parameter not in found:
                like = self.kind_of(parameter)
                if like not in known:
                    outputs = self._quantized_shape(parameter)[0]
                    known[like] = nbytes_of(self._sample(parameter), outputs, on_gpu=on_gpu)
                found[parameter] = known[like]
        return found

    def gpu_problem(self) -> str:
        """Why GPUs do not multiply with the quantized matrices as they are stored; empty if they do.

        A few outputs of each kind are read. Raises `ModelLoadError`.
        """
        if self._dtype is torch.float16 and any(name.endswith(_BLOCKS) for name in self._file_of):
            return "GPUs multiply experts in MXFP4 with bfloat16 or float32, not with float16"
        found = filter(None, map(self.matrix_of, self._file_of))
        kinds = {self.kind_of(parameter): parameter for parameter in found}
        for parameter in kinds.values():
            try:
                self._sample(parameter).words()
            except NoGpuProduct as error:
                return f"GPUs have no product for {parameter}: {error}"
        return ""

    def kind_of(self, parameter: str) -> tuple[tuple[str, object], ...]:
        """What the bytes of a matrix depend on: shapes, types, and whether inputs are in another order.

        Its own shape is among them, since that of packed numbers may be the same for others. All plain ones are of one
        kind. Raises `ModelLoadError`.
        """
        if not self.is_quantized(parameter):
            return ()
        module = parameter.rpartition(".")[0]
        parts = ((word, self._mapped(f"{module}.{word}")) for word in sorted(self._words[module] & self.format.parts))
        stored = ((word, (tuple(tensor.shape), tensor.dtype, _is_shuffled(tensor))) for word, tensor in parts)
        return (("shape", self._quantized_shape(parameter)), *stored)

    def _experts_nbytes(self, parameter: str, blocks: torch.Tensor) -> int:
        """Bytes of the matrices of all experts, as a CPU has them."""
        experts, outputs, groups, _ = blocks.shape
        shape = (int(experts), int(outputs), int(groups) * BLOCK)
        one = ExpertRegion(slice(0, 1), Region(slice(0, 1), slice(0, shape[2])))
        sample = self.experts(parameter, shape, one)
        return 0 if sample is None else shape[0] * sample[0].nbytes_of(shape[1])

    def _sample(self, parameter: str) -> Storage:
        """The first outputs of a matrix."""
        is_quantized = self.is_quantized(parameter)
        outputs, inputs = self._quantized_shape(parameter) if is_quantized else self._plain(parameter).shape
        return self.matrix(parameter, None, Region(slice(0, min(outputs, SAMPLED_OUTPUTS)), slice(0, inputs)))

    def _quantized_shape(self, parameter: str) -> tuple[int, int]:
        module = parameter.rpartition(".")[0]
        with self._naming(module):
            return self.format.shape(self._parts(module, self._words[module] & self.format.parts))

    def experts(self, parameter: str, shape: Sequence[int], region: ExpertRegion) -> list[Storage] | None:
        """A region of the experts' matrices as they are stored, `None` if they are plain. See `expert_storages`.

        Raises `ModelLoadError`, and `CutRefused`.
        """
        module, _, name = parameter.rpartition(".")
        if f"{parameter}_blocks" not in self:
            return None
        with self._naming(module):
            return expert_storages(self._parts(module, self._words[module]), name, shape, region)

    def _parts(self, module: str, words: Iterable[str]) -> Parts:
        names = {word: f"{module}.{word}" for word in words}
        return Parts(module, {word: self._mapped(name) for word, name in names.items()})

    def vector(self, parameter: str) -> torch.Tensor:
        """A plain tensor, in its own type.

        Raises `ModelLoadError` for one that is quantized and whose scales are not read, as experts in one tensor.
        """
        tensor = self._plain(parameter)
        # Causal masks of old checkpoints, which no model reads, are [1, 1, length, length].
        if tensor.dim() < 4 and tensor.dtype.itemsize == 1 and tensor.dtype is not torch.bool:
            raise self._without_scale(parameter, tensor)
        return tensor.clone()

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Inside, an error of a format or of a file becomes a `ModelLoadError` that names a layer or a tensor."""
        try:
            yield
        except CutRefused:
            raise
        except (ValueError, RuntimeError, IndexError, SafetensorError) as error:
            raise ModelLoadError(f"quantized model {str(self.path)!r}: {name!r}: {error}") from error

    def _without_scale(self, parameter: str, tensor: torch.Tensor) -> ModelLoadError:
        return ModelLoadError(
            f"quantized model {str(self.path)!r}: {parameter!r} is {tensor.dtype} and has no scale that is read; "
            "it must be float32, bfloat16 or float16"
        )

    def _mapped(self, name: str) -> torch.Tensor:
        """A tensor whose numbers are read when they are used. Whoever keeps some copies them."""
        with safe_open(self._file_of[name], framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
        return tensor

    def _plain(self, parameter: str) -> torch.Tensor:
        if parameter not in self._file_of:
            raise ModelLoadError(f"quantized model {str(self.path)!r}: there is no tensor for {parameter!r}")
        with self._naming(parameter):
            return self._mapped(parameter)

    def _check(self, parameter: str, found: tuple[int, ...], shape: tuple[int, int] | None) -> None:
        if shape is not None and tuple(found) != tuple(shape):
            raise ModelLoadError(
                f"quantized model {str(self.path)!r}: {parameter!r} is {[*found]}; it must be {[*shape]}"
            )


def _is_shuffled(tensor: torch.Tensor) -> bool:
    """Whether the numbers of a list, as the groups of inputs, do not ascend."""
    is_list = tensor.dim() == 1 and tensor.dtype in (torch.int32, torch.int64)  # not the bytes of many scales
    return is_list and bool((tensor.diff() < 0).any())


_TABLES = ("token_embd.weight", "embed_tokens.weight", "wte.weight")
_HEADS = ("output.weight", "lm_head.weight")


def stored_checkpoint(directory: Path, dtype: torch.dtype) -> QuantizedCheckpoint | GgufFile | None:
    """What `quantization: stored` reads a model's weights from; `None` for one that has no such weights.

    `dtype` is that of plain matrices. Raises `ModelLoadError`.
    """
    settings = quantization_of(directory)
    if settings is not None:
        known = str(settings.get("quant_method")) in FORMATS
        return QuantizedCheckpoint(directory, dtype) if known else None
    file = stored_file(directory)
    return None if file is None else GgufFile(file, dtype)


def stored_bytes(directory: Path, dtype: str, *, read_by_a_step: bool = False, on_gpu: bool = False) -> int | None:
    """Bytes of a model's weights with `quantization: stored`; `None` for one that has no such weights.

    Plain tensors are kept as `dtype`. With `read_by_a_step`, an embedding that is not the head, too, is left out,
    because a step reads a few of its rows only. `on_gpu`: matrices are as products there read them. Raises
    `ModelLoadError`.
    """
    checkpoint = stored_checkpoint(directory, getattr(torch, dtype))
    if checkpoint is None:
        return None
    sizes = checkpoint.sizes(on_gpu=on_gpu)
    has_head = any(name in _HEADS for name in sizes)
    if on_gpu and has_head:  # nothing is multiplied with the table
        sizes |= {name: size for name, size in checkpoint.sizes().items() if name.endswith(_TABLES)}
    left_out = _TABLES if read_by_a_step and has_head else ()
    return sum(size for name, size in sizes.items() if not name.endswith(left_out))
