"""Resolves the model names in a configuration to local directories, before any actor starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.model_section import ModelSection
from cluster.core.config.sections import Configuration
from cluster.core.errors import ModelLoadError
from deploy.packaged_drafts import INSTALL, is_installed, packaged_drafts
from deploy.settings import code_directory
from workers.model.formats.hub import draft_directory
from workers.model.formats.registry import find_format, formats
from workers.model.packaged.catalogue import PACKAGED_MODELS, prepared_before

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
    """The model name that clients send: `target.served_name`, or the last part of the path.

    That of a GGUF file is without `.gguf`, and without the number of a part.
    """
    named, path = configuration.target.served_name, Path(configuration.target.path)
    if named or path.suffix != ".gguf":
        return named or path.name
    from workers.model.gguf_header import model_stem  # it imports numpy, and most commands do without

    return model_stem(path)


def with_served_name(configuration: Configuration) -> Configuration:
    """The configuration with the served name set, as its path may be replaced."""
    named = {"served_name": served_name(configuration)}
    return configuration.model_copy(update={"target": configuration.target.model_copy(update=named)})


def resolve_models(configuration: Configuration, cache_directory: Path, report: ReportProgress) -> Models:
    """Find, fetch or convert the configured models. Raises `ModelLoadError` with a remedy."""
    configuration = with_settled_quantization(configuration)
    found = with_module_directories(configuration.draft, report)
    configuration = with_moved_fusion(configuration, configuration.draft, found)
    target = _resolve(configuration.target, cache_directory, report)
    draft = None
    if configuration.draft.weights is not None:
        draft = _resolve(configuration.draft.weights, cache_directory, report)
    return Models(_with_paths(configuration, target, draft, str(code_directory(cache_directory))), target, draft)


def with_draft_directory(configuration: Configuration, cache_directory: Path) -> Configuration:
    """The configuration of a drafter without a target: the draft is found, fetched or converted, the target is not.

    Of the target, a directory on this machine serves to compare vocabularies. Raises `ModelLoadError`.
    """
    configuration = with_settled_quantization(configuration)
    section = configuration.target
    prepared = prepared_before(section.path, cache_directory, stored=section.quantization == "stored")
    target = prepared or Path(expanduser(section.path))
    weights = configuration.draft.weights
    draft = None if weights is None else _resolve(weights, cache_directory, lambda _: None)
    return _with_paths(configuration, target, draft, str(code_directory(cache_directory)))


def with_settled_quantization(configuration: Configuration) -> Configuration:
    """The configuration with another `target.quantization` than `auto`."""
    target = configuration.target
    if target.quantization != "auto":
        return configuration
    packaged = None if Path(target.path).is_dir() else PACKAGED_MODELS.get(target.path)
    is_kept = packaged is not None and packaged.quantized and target.device == "cpu" and target.tensor_parallel == 1
    settled = target.model_copy(update={"quantization": "stored" if is_kept else "none"})
    return configuration.model_copy(update={"target": settled})


def _resolve(section: ModelSection, cache_directory: Path, report: ReportProgress) -> Path:
    packaged = _packaged(section.path)
    if packaged is not None:
        return packaged
    is_stored = section.quantization == "stored"
    prepared = prepared_before(section.path, cache_directory, stored=is_stored)
    if prepared is not None:
        return prepared
    report(f"finding {section.path} (it is fetched or converted the first time)")
    # Importing torch and transformers takes seconds, and most commands do not need them.
    from workers.model.model_files import resolve_model_directory

    return resolve_model_directory(section.path, cache_directory, section.revision, report, stored=is_stored)


def _packaged(name: str) -> Path | None:
    """The directory of a packaged draft; `None` for any other path. Raises `ModelLoadError` if it is not installed."""
    directory = packaged_drafts().get(name)
    if directory is not None and not is_installed(directory):
        raise ModelLoadError(f"draft {name!r}: its weights are not installed; run `{INSTALL}`")
    return directory


def with_module_directories(draft: DraftSection, report: ReportProgress = lambda _: None) -> DraftSection:
    """The section with a directory for each drafting module, which may be fetched. Raises `ModelLoadError`."""
    for method, section in draft.modules.items():
        directory = _packaged(section.path)
        try:
            directory = directory or draft_directory(section.path, getattr(section, "revision", None), report)
            is_known = find_format(directory) is not None
        except ModelLoadError as error:
            raise ModelLoadError(f"draft.{method}.path: {error}; {_known_drafts()}") from None
        if not is_known:
            raise ModelLoadError(f"draft.{method}.path: {section.path!r} holds no drafting module; {_known_drafts()}")
        draft = draft.with_module(method, path=str(directory.resolve()))
    return draft


def with_moved_fusion(configuration: Configuration, before: DraftSection, after: DraftSection) -> Configuration:
    """The configuration with the section `after`. The draft of `target.evidence.fusion` moves as its module does.

    `before` has the same modules, with the path that `target.evidence.fusion` has now.
    """
    evidence = configuration.target.evidence
    for method, section in before.modules.items():
        if evidence.fusion == section.path:
            evidence = evidence.model_copy(update={"fusion": after.modules[method].path})
            break
    target = configuration.target.model_copy(update={"evidence": evidence})
    return configuration.model_copy(update={"target": target, "draft": after})


def _known_drafts() -> str:
    known = ", ".join(one.name for one in formats())
    return f"packaged ones are {', '.join(packaged_drafts())}; formats of others are {known}"


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
