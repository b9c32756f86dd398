"""Resolves the model names in a configuration to local directories, before any actor starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.core.config.sections import Configuration, ModelSection
from cluster.core.errors import ModelLoadError

COMPILED = "compiled"
"""Folder of the cache for code compiled on this machine."""

DRAFTS = {"smollm2-135m-draft": "smollm2-135m-instruct"}
"""Packaged draft models: from the name of a draft to the name of its target, which is also its folder's name."""

ReportProgress = Callable[[str], None]
"""Called with a short description at the start of every stage of long work."""


@dataclass(frozen=True, slots=True)
class Models:
    """The directories of the models, and the configuration with these paths."""

    configuration: Configuration
    """The configuration with every path resolved and the served name set."""
    target: Path
    draft: Path | None


def served_name(configuration: Configuration) -> str:
    """The model name that clients send: `target.served_name`, or the last part of the path without `.gguf`."""
    return configuration.target.served_name or Path(configuration.target.path).name.removesuffix(".gguf")


def resolve_models(configuration: Configuration, cache_directory: Path, report: ReportProgress) -> Models:
    """Find, fetch or convert the configured models. Raises `ModelLoadError` with a remedy."""
    target = _resolve(configuration.target, cache_directory, report)
    draft = None
    if configuration.draft.weights is not None:
        draft = _resolve(configuration.draft.weights, cache_directory, report)
    return Models(_with_paths(configuration, target, draft, str(cache_directory / COMPILED)), target, draft)


def _resolve(section: ModelSection, cache_directory: Path, report: ReportProgress) -> Path:
    if section.path in DRAFTS:
        return _shipped(section.path)
    report(f"finding {section.path} (it is fetched or converted the first time)")
    # Importing torch and transformers takes seconds, and most commands do not need them.
    from workers.model.model_files import resolve_model_directory

    return resolve_model_directory(section.path, cache_directory, section.revision)


def _shipped(name: str) -> Path:
    directory = Path(__file__).parent / "drafts" / DRAFTS[name]
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"model {name!r}: its files are not in {str(directory)!r}; install Pilotfish again")
    return directory


def _with_paths(configuration: Configuration, target: Path, draft: Path | None, compiled: str) -> Configuration:
    def resolved(section: ModelSection, path: Path) -> dict[str, str | None]:
        return {"path": str(path), "revision": None, "compile_directory": section.compile_directory or compiled}

    sections = {
        "target": configuration.target.model_copy(
            update=resolved(configuration.target, target) | {"served_name": served_name(configuration)}
        )
    }
    weights = configuration.draft.weights
    if draft is None or weights is None:
        return configuration.model_copy(update=sections)
    drafting = configuration.draft.with_weights(**resolved(weights, draft))
    return configuration.model_copy(update=sections | {"draft": drafting})
