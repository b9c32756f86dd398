"""Resolves a model name to a local directory of safetensors, configuration and tokenizer.

The directory of a GGUF model that is served as it is stored has no safetensors: its weights stay in their files.
Weights are read only from safetensors and GGUF, because other formats can run code.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os.path import expanduser
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from cluster.core.errors import ModelLoadError
from workers.model.complete_weights import load_complete
from workers.model.dequantized import write_dequantized_from
from workers.model.description import directory_fault, gguf_fault
from workers.model.formats.hub import Report, fetch
from workers.model.gguf_header import GgufModel, join_parts, model_stem, parts_of, read_gguf
from workers.model.gguf_settings import completed_settings
from workers.model.gguf_tokenizer import complete_tokenizer, end_tokens
from workers.model.packaged.catalogue import PACKAGED_MODELS, packaged_file, prepared_directory
from workers.model.packaged.marian import convert_marian, extract_entries
from workers.model.stored.gguf_file import GgufFile
from workers.model.stored.quantized_checkpoint import QuantizedCheckpoint, is_dequantized, quantization_of
from workers.model.stored.source import STORED_IN, write_stored_in
from workers.model.stretch import StretchRequest, parse_stretch, stretch_model

logger = logging.getLogger(__name__)

_HUB_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_HUB_FILES = ["config.json", "generation_config.json", "tokenizer*"]
_HUB_TOKENIZER_FILES = [
    *("special_tokens_map.json", "vocab.json", "merges.txt", "chat_template.json", "*.jinja"),
    *("source.spm", "target.spm"),
]
_GGUF_READING = "with scaled rotations and divided texts\n"
"""What of GGUF files is read. It changes with `completed_settings` and `complete_tokenizer`, so that files are
converted again."""
_DESCRIBED = "as it is stored\n"
"""Begins what is read of GGUF files whose weights are not converted."""
_QUANTIZED_READING = "with smaller last groups\n"
"""What of quantized checkpoints is read. It changes with their reading, so that files are converted again."""


def resolve_model_directory(
    path: str,
    cache_directory: Path,
    revision: str | None = None,
    report: Report = lambda _: None,
    *,
    stored: bool = False,
    drawn: bool = False,
) -> Path:
    """A local directory with `config.json`, safetensors and a tokenizer for `path`.

    `path` is a directory, a `.gguf` file, a packaged model's name or a hub id. A GGUF file, or a checkpoint with
    GPTQ, AWQ or compressed-tensors weights, is de-quantized once into `cache_directory`. With `stored`, such a
    checkpoint stays as it is, and the directory of a GGUF model has no safetensors. With `drawn`, too, and no weights
    are looked for or fetched, because they are drawn at random. `path@x10` is the model of
    `path` at 10 times its cost with the same function (see `workers.model.stretch`). `report` is called while files
    are fetched. Raises `ModelLoadError`, which says what to do.
    """
    directory = Path(expanduser(path))
    if directory.is_dir() and (stored or drawn):
        return _checked(directory, stored=True, drawn=drawn)
    if directory.is_dir():
        return _plain_weights(_checked(directory), cache_directory)
    stretch = parse_stretch(path)
    if stretch is not None:
        return _stretched(stretch, cache_directory, revision, report)
    if path in PACKAGED_MODELS:
        return _prepared_package(path, cache_directory, stored=stored or drawn)
    if directory.suffix == ".gguf":
        if not directory.is_file():
            raise ModelLoadError(f"model path {path!r}: no such file")
        return _prepared_gguf(directory, cache_directory, stored=stored or drawn)
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ModelLoadError(
            f"model path {path!r}: no such directory; give a directory, a .gguf file, a hub id "
            f"(owner/name) or one of {', '.join(sorted(PACKAGED_MODELS))}"
        )
    wanted = [*([] if drawn else _HUB_WEIGHTS), *_HUB_FILES, *_HUB_TOKENIZER_FILES]
    found = _checked(fetch(f"model path {path!r}", path, revision, wanted, report), drawn=drawn)
    return found if stored or drawn else _plain_weights(found, cache_directory)


def _stretched(request: StretchRequest, cache_directory: Path, revision: str | None, report: Report) -> Path:
    """The stretched copy of a model, made once."""
    original = resolve_model_directory(request.path, cache_directory, revision, report)
    identity = _identity(sorted(original.glob("*.safetensors")))
    return _converted(
        lambda building, _: stretch_model(original, building, request.kind, request.factor),
        cache_directory / f"{original.name}-{request.kind}-x{request.factor}-{identity}",
    )


def _prepared_gguf(file: Path, cache_directory: Path, *, stored: bool) -> Path:
    """The directory of a GGUF model, made once. With `stored`, its weights stay in their files."""
    first, reading = parts_of(file)[0], f"{_DESCRIBED if stored else ''}{_GGUF_READING}"
    destination = cache_directory / f"{model_stem(file)}-{_identity(_parts(file), reading)}"

    def describe(building: Path, _: Path) -> None:
        _describe_gguf(file, building)
        write_stored_in(building, first)

    if stored:
        return _converted(describe, destination, stored=True)
    converted = _converted(lambda building, scratch: _convert_gguf(_whole_gguf(file, scratch), building), destination)
    if not (converted / STORED_IN).is_file():  # new, or converted by a version that wrote no note
        with suppress(OSError):
            write_stored_in(converted, first)
    return converted


def _prepared_package(name: str, cache_directory: Path, *, stored: bool) -> Path:
    """The directory of a packaged model, made once. With `stored`, the weights of a GGUF model stay in their file."""
    packaged = PACKAGED_MODELS[name]
    is_described = stored and not packaged.is_marian

    def prepare(building: Path, scratch: Path) -> None:
        file = packaged_file(name, scratch)
        if packaged.is_marian:
            entries = scratch / "entries"
            entries.mkdir()
            extract_entries(file, entries)
            convert_marian(entries, building)
            return
        if is_described:
            _describe_gguf(file, building)
            if file.parent == scratch:
                file.rename(building / name)  # where `stored_file` looks for it
        else:
            _convert_gguf(file, building)
        write_dequantized_from(building, packaged.quantized)

    return _converted(prepare, prepared_directory(name, cache_directory, stored=stored), stored=is_described)


def _checked(directory: Path, *, stored: bool = False, drawn: bool = False) -> Path:
    fault = directory_fault(directory, stored=stored, drawn=drawn)
    if fault is not None:
        raise ModelLoadError(f"model path {str(directory)!r}: {fault}")
    return directory


def _plain_weights(directory: Path, cache_directory: Path) -> Path:
    """The directory itself, or its de-quantized copy if its weights are quantized in a known format."""
    settings = quantization_of(directory)
    if settings is None or not is_dequantized(directory):
        return directory
    files = sorted(file for file in directory.iterdir() if file.suffix in (".safetensors", ".json"))
    destination = cache_directory / f"{directory.name}-{_identity(files, _QUANTIZED_READING)}"

    def convert(building: Path, _: Path) -> None:
        logger.info(
            "%s: its weights of %s are de-quantized into %s; quantization: stored would keep them as they are",
            *(directory, settings["quant_method"], destination),
        )
        dequantize(directory, building)
        write_dequantized_from(building, str(settings["quant_method"]))

    return _converted(convert, destination)


def _identity(files: Sequence[Path], reading: str = "") -> str:
    """A hash of the files' paths, sizes and times, so that another file of the same name is another model.

    `reading` tells apart what earlier versions made of the same files.
    """
    identity = reading + "".join(
        f"{file.resolve()}\n{status.st_size}\n{status.st_mtime_ns}"
        for file, status in ((file, file.stat()) for file in files)
    )
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def _converted(convert: Callable[[Path, Path], None], destination: Path, *, stored: bool = False) -> Path:
    """Call `convert(directory, scratch)` to fill `destination`, unless that was done before.

    `scratch` is a directory that lasts as long as the conversion. With `stored`, the weights may be elsewhere.
    Raises `ModelLoadError` where files cannot be read or written.
    """
    if (destination / "config.json").is_file():
        return _checked(destination, stored=stored)
    transformers_logging.disable_progress_bar()
    building: Path | None = None
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f"{destination.name}.", dir=destination.parent))
        with tempfile.TemporaryDirectory(prefix=f"{destination.name}.parts.", dir=destination.parent) as scratch:
            convert(building, Path(scratch))
        # The rename is atomic, so a directory of this name with a configuration is complete.
        building.chmod(0o755)
        building.rename(destination)
    except OSError as error:
        if not (destination / "config.json").is_file():  # another process may have converted it first
            if not _is_of_storing(error, destination):
                raise ModelLoadError(f"{destination}: the model cannot be converted: {error}") from error
            raise ModelLoadError(
                f"{destination}: the converted model cannot be stored; {error}; set PILOTFISH_CACHE_DIR to a directory "
                "with room that this user may write"
            ) from error
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)
    return _checked(destination, stored=stored)


def _is_of_storing(error: OSError, destination: Path) -> bool:
    """Whether an error of a conversion is of what it writes. What it reads may be beside `destination`, too."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return True
    if error.filename is None:
        return False
    place, parent = Path(str(error.filename)).absolute(), destination.parent.absolute()
    written = place.is_relative_to(parent) and str(place.relative_to(parent)).startswith(destination.name)
    return written or parent.is_relative_to(place)


def _parts(file: Path) -> Sequence[Path]:
    """All files of a GGUF model. Raises `ModelLoadError` for a part that is missing, or no file."""
    parts = parts_of(file)
    if len(parts) > 1 and not all(part.is_file() for part in parts):
        raise ModelLoadError(f"GGUF file {gguf_fault(file)}")
    return parts


def _whole_gguf(file: Path, scratch: Path) -> Path:
    """The file, or a file in `scratch` that its parts are joined to. Raises `ModelLoadError`."""
    if len(parts_of(file)) == 1:
        return file
    if (fault := gguf_fault(file)) is not None:
        raise ModelLoadError(f"GGUF file {fault}")
    joined = scratch / f"{model_stem(file)}.gguf"
    join_parts(file, joined)
    return joined


def _convert_gguf(file: Path, destination: Path) -> None:
    """Write a GGUF model's configuration, its tokenizer, and its weights in float32. Raises `ModelLoadError`."""
    if (fault := gguf_fault(file)) is not None:
        raise ModelLoadError(f"GGUF file {fault}")
    try:
        reader = read_gguf(file)
        quantized = load_complete(AutoModelForCausalLM, file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = _gguf_tokenizer(file, reader)
        config = _completed_config(quantized, reader)
    except Exception as error:  # the reader of a broken file may raise anything
        raise ModelLoadError(f"GGUF file {str(file)!r} cannot be converted: {error}") from error
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = _generation(model, reader)
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    write_dequantized_from(destination, f"GGUF {_types_of(reader)}")


def _describe_gguf(file: Path, destination: Path) -> None:
    """Write what `_convert_gguf` writes without the weights: no number of a matrix is read. Raises `ModelLoadError`."""
    if (fault := gguf_fault(file)) is not None:
        raise ModelLoadError(f"GGUF file {fault}")
    GgufFile(file)  # raises for an architecture whose weights are not read as they are stored
    first = parts_of(file)[0]
    try:
        reader = read_gguf(file)
        stated = AutoConfig.from_pretrained(first.parent, gguf_file=first.name)
        stated.tie_word_embeddings = all(tensor.name != "output.weight" for tensor in reader.tensors)  # in any part
        if stated.num_hidden_layers > len(reader.tensors):
            raise ValueError(f"it has {stated.num_hidden_layers} layers and {len(reader.tensors)} tensors")
        with torch.device("meta"):
            config = _completed_config(AutoModelForCausalLM.from_config(stated), reader)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        tokenizer = _gguf_tokenizer(first, reader)
    except Exception as error:  # the reader of a broken file may raise anything
        raise ModelLoadError(f"GGUF file {str(file)!r} cannot be prepared: {error}") from error
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(destination)
    _generation(model, reader).save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    write_dequantized_from(destination, f"GGUF {_types_of(reader)}")


def _gguf_tokenizer(file: Path, reader: GgufModel) -> Any:
    """The tokenizer of a GGUF model, whose keys `file` has. Raises `ValueError`, and what `transformers` raises."""
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    complete_tokenizer(tokenizer, reader)
    return tokenizer


def _completed_config(model: Any, reader: GgufModel) -> Any:
    """The configuration of a model that `transformers` made of a GGUF file, with the keys that it drops."""
    settings = completed_settings(model.config.to_dict(), model.state_dict(), reader)
    # A model loaded from GGUF would be saved as quantized, so its plain weights move to a plain model.
    settings.pop("quantization_config", None)
    return AutoConfig.for_model(**settings)


def _generation(model: Any, reader: GgufModel) -> GenerationConfig:
    """How a GGUF model generates, with all tokens that end it."""
    found: Any = GenerationConfig.from_model_config(model.config)
    found.eos_token_id = end_tokens(getattr(model.config, "eos_token_id", None), reader) or None
    return cast("GenerationConfig", found)


def _types_of(reader: GgufModel) -> str:
    """The types of a GGUF model's matrices, the most frequent first, as `Q4_1, Q8_0`."""
    matrices = (tensor for tensor in reader.tensors if len(tensor.shape) > 1)
    return ", ".join(kind for kind, _ in Counter(tensor.tensor_type.name for tensor in matrices).most_common())


def end_of_sequence_ids(directory: Path) -> tuple[int, ...]:
    """The tokens that end generation: those of generation_config.json or else config.json, and the tokenizer's own one.

    A model that was trained further for conversations may end its turns with a token that only its tokenizer names.
    """
    files = (directory / name for name in ("generation_config.json", "config.json"))
    found = (_read_object(file).get("eos_token_id") for file in files)
    stated: Any = next((one for one in found if one is not None), [])
    settings = _read_object(directory / "tokenizer_config.json")
    end, added = settings.get("eos_token"), settings.get("added_tokens_decoder") or {}
    end = end.get("content") if isinstance(end, dict) else end
    own = [int(token) for token, one in added.items() if isinstance(end, str) and one.get("content") == end]
    ends = tuple(dict.fromkeys([*(stated if isinstance(stated, list) else [int(stated)]), *own]))
    known = () if ends else _read_object(directory / "tokenizer.json").get("added_tokens", ())
    return ends or tuple(int(one["id"]) for one in known if one.get("content") == end)


def _read_object(file: Path) -> Mapping[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found if isinstance(found, dict) else {}


def dequantize(directory: Path, destination: Path) -> None:
    """Write the model in `directory` to `destination` with plain weights, in the type that its configuration states.

    So no library of the format is needed, every device serves it, and it may be quantized again with int8. Raises
    `ModelLoadError`, which names the tensor, where the checkpoint is not what its configuration says.
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
    if (templates := directory / "additional_chat_templates").is_dir():
        shutil.copytree(templates, destination / templates.name)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (destination / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
