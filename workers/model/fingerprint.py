"""A short name of everything that the numbers of a model depend on: equal fingerprints, equal computations."""

from __future__ import annotations

import json
import struct
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import torch

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ModelLoadError
from workers.forward.backends.choice import ChosenBackend
from workers.forward.compilation import should_compile
from workers.forward.loaded_model import LoadedModel
from workers.forward.native.build import products
from workers.forward.replace_linear import has_only_fast_linears
from workers.model.gguf_header import GgufHeader, parts_of
from workers.model.stored.source import stored_alone
from workers.model.weight_files import weight_files

_SAMPLE_BYTES = 1024
_MOST_HEADER_BYTES = 100 * 1024 * 1024
"""The longest header that a safetensors file may have."""
_TEXTS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def fingerprint(section: TargetSection, model: LoadedModel, attention: ChosenBackend | None) -> str:
    """Name what answers depend on beside the request: `tp1-invariant-…` or `tp1-batched-…`.

    It has the number of ranks, whether other requests in a batch can change a bit (see `is_batch_invariant`), and a
    hash of weights, number format, kernels, attention backend, ranks and settings that are LOSSY. For the same request
    and seed, targets of one fingerprint on machines of one kind give the same answer; a `batched` one may choose the
    other of two tokens whose logits are nearly equal.
    """
    window = [section.kv.window, section.kv.sinks] if section.kv.window is not None else None
    rule = section.model_dump(mode="json", include={"acceptance": True, section.acceptance: True})
    parts = [
        weights_digest(Path(section.path)),
        str(model.dtype),
        section.kv.dtype,
        section.quantization,
        *(["random weights"] if section.load_format == "dummy" else []),
        _kernels(section, model),
        "" if model.native is not None or attention is None else attention.name,
        model.tensor_parallel,
        *(["whole experts"] if section.enable_expert_parallel and model.tensor_parallel > 1 else []),
        rule,
        window,
    ]
    digest = blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=6).hexdigest()
    batch = "invariant" if is_batch_invariant(section, model, attention) else "batched"
    return f"tp{model.tensor_parallel}-{batch}-{digest}"


def is_batch_invariant(section: TargetSection, model: LoadedModel, attention: ChosenBackend | None) -> bool:
    """Whether a sequence's logits have the same bits alone and beside any others.

    So it is where the CPU kernels compute a decoder, and in float32 where uncompiled modules of `transformers` do, on
    one rank of a CPU with an attention backend of which this holds, or without attention, if all of their matrices are
    in linear layers. A mixture of experts, an encoder, a GPU, or a compiled layer is not known to be.
    """
    if model.device.type != "cpu" or model.tensor_parallel > 1 or model.source is not None:
        return False
    if model.native is not None:
        return True
    is_plain = model.dtype is torch.float32 and not should_compile(section)
    is_invariant = not model.attends or (attention is not None and attention.capabilities.is_batch_invariant)
    return is_plain and is_invariant and has_only_fast_linears(model.module)


def weights_digest(directory: Path) -> str:
    """Return a hash of the configuration, the tokenizer, and the weights: all headers, and a sample of every tensor.

    Weights are in safetensors, else in the GGUF file that the directory was made of. It reads a kilobyte of each
    tensor, so that it takes milliseconds for any model. Raises `ModelLoadError`.
    """
    digest = blake2b(digest_size=16)
    for name in _TEXTS:
        file = directory / name
        digest.update(file.read_bytes() if file.is_file() else b"")
        digest.update(b"\0")
    for file in weight_files(directory):
        with file.open("rb") as opened:
            _add_weights(opened, file, digest)
    source = stored_alone(directory)
    for part in () if source is None else parts_of(source):
        _add_gguf(part, digest)
    return digest.hexdigest()


def _add_gguf(file: Path, digest: Any) -> None:
    try:
        reader = GgufHeader(file)
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        raise ModelLoadError(f"GGUF file {str(file)!r} cannot be read: {error}") from error
    digest.update(reader.data[: reader.data_offset])
    for tensor in reader.tensors:
        first = tensor.data_offset + max(0, (tensor.n_bytes - _SAMPLE_BYTES) // 2)
        digest.update(reader.data[first : first + min(_SAMPLE_BYTES, tensor.n_bytes)])


def _add_weights(opened: BinaryIO, file: Path, digest: Any) -> None:
    size = int.from_bytes(opened.read(8), "little")
    if size > _MOST_HEADER_BYTES:
        raise ModelLoadError(f"{file}: a header of {size} bytes; it must be at most {_MOST_HEADER_BYTES}")
    header = opened.read(size)
    digest.update(header)
    try:
        tensors = json.loads(header)
        spans = sorted(entry["data_offsets"] for name, entry in tensors.items() if name != "__metadata__")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelLoadError(f"{file}: its header cannot be read: {error}") from error
    for first, last in spans:
        opened.seek(8 + size + max(first, (first + last - _SAMPLE_BYTES) // 2))
        digest.update(opened.read(min(_SAMPLE_BYTES, last - first)))


def _kernels(section: TargetSection, model: LoadedModel) -> list[str]:
    """Return what computes: Pilotfish's kernels with their products or torch's, and the kind of processor."""
    if model.device.type == "cuda":
        processor = torch.cuda.get_device_name(model.device)
    else:
        processor = torch.backends.cpu.get_cpu_capability()
    kernels = "torch" if model.native is None else "native"
    is_ours = model.native is not None or section.compile_directory is not None or section.quantization != "none"
    if model.device.type == "cpu" and is_ours:
        kernels += f", {products(section.compile_directory)}"  # which multiply matrices of modules, too
    return [kernels, processor, torch.__version__]
