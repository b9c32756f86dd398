"""Resolves the model names in a configuration to local directories, before any actor starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path

from cluster.core.config.draft_section import DraftSection
from cluster.core.config.model_section import ModelSection
from cluster.core.config.sections import Configuration
from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ConfigurationError, ModelLoadError
from deploy.packaged_drafts import INSTALL, is_installed, packaged_drafts
from deploy.settings import code_directory
from workers.model.formats.hub import draft_directory
from workers.model.formats.registry import find_format, formats
from workers.model.packaged.catalogue import PACKAGED_MODELS, prepared_before
from workers.model.stored.source import OF_PLAIN, is_plain

logger = logging.getLogger(__name__)

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
    """Find, fetch or convert the configured models, and settle `target.quantization`.

    Raises `ModelLoadError` with a remedy, and `ConfigurationError`.
    """
    found = with_module_directories(configuration.draft, report)
    configuration = with_moved_fusion(configuration, configuration.draft, found)
    section, target = _settled_target(configuration.target, cache_directory, report)
    configuration = configuration.model_copy(update={"target": section})
    draft = None
    if configuration.draft.weights is not None:
        draft = _resolve(configuration.draft.weights, cache_directory, report)
    return Models(_with_paths(configuration, target, draft, str(code_directory(cache_directory))), target, draft)


def with_draft_directory(configuration: Configuration, cache_directory: Path) -> Configuration:
    """The configuration of a drafter without a target: the draft is found, fetched or converted, the target is not.

    Of the target, a directory on this machine serves to compare vocabularies. Raises `ModelLoadError`.
    """
    section = configuration.target
    ways = {"auto": (True, False), "stored": (True,)}.get(section.quantization, (False,))
    ways = (True, False) if section.load_format == "dummy" else ways
    prepared = (prepared_before(section.path, cache_directory, stored=is_stored) for is_stored in ways)
    target = next(filter(None, prepared), None) or Path(expanduser(section.path))
    weights = configuration.draft.weights
    draft = None if weights is None else _resolve(weights, cache_directory, lambda _: None)
    return _with_paths(configuration, target, draft, str(code_directory(cache_directory)))


def _settled_target(
    section: TargetSection, cache_directory: Path, report: ReportProgress
) -> tuple[TargetSection, Path]:
    """The target's section with another `quantization` than `auto`, and its directory.

    Raises `ModelLoadError`, and `ConfigurationError` for plain weights that are to stay as they are stored.
    """
    if section.quantization != "auto":
        directory = _resolve(section, cache_directory, report)
        if section.quantization == "stored" and is_plain(str(directory)):
            raise ConfigurationError(
                f"target.quantization: stored is refused for {section.path}, whose weights are plain; it must be "
                f"{OF_PLAIN}"
            )
        return section, directory
    kept, plain = (section.model_copy(update={"quantization": how}) for how in ("stored", "none"))
    if section.load_format == "dummy":
        return plain, _resolve(plain, cache_directory, report)
    packaged = None if Path(section.path).is_dir() else PACKAGED_MODELS.get(section.path)
    if packaged is not None and packaged.is_marian:
        return plain, _resolve(plain, cache_directory, report)
    source: Path | None = None
    try:
        directory = source = _resolve(kept, cache_directory, report)
    except ModelLoadError as error:  # a GGUF file of another architecture, or no model at all
        refusal = str(error)
    else:
        if packaged is not None and section.device == "cpu" and section.tensor_parallel == 1:
            return kept, directory  # without an import that takes seconds
        from workers.model.stored_choice import choose_stored

        choice = choose_stored(section, directory, on_gpu=_is_on_gpu(section))
        if choice.is_kept:
            return kept, directory
        refusal = choice.refusal
        if not refusal:  # plain weights, or those that only another library reads
            return plain, directory
    found = _resolve(plain, cache_directory, report)
    if refusal:
        from workers.model.stored_choice import refusal_line

        logger.warning("%s", refusal_line(section, source or found, found, refusal))
    return plain, found


def _is_on_gpu(section: TargetSection) -> bool:
    from workers.model.devices import choose_device  # imports torch, which takes seconds

    return section.device == "cuda" or choose_device(section.device, 0).type != "cpu"


def _resolve(section: ModelSection, cache_directory: Path, report: ReportProgress) -> Path:
    packaged = _packaged(section.path)
    if packaged is not None:
        return packaged
    is_drawn = section.load_format == "dummy"
    is_stored = section.quantization == "stored" or is_drawn  # random weights need a description alone
    prepared = prepared_before(section.path, cache_directory, stored=is_stored)
    if prepared is not None:
        return prepared
    report(f"finding {section.path} (it is fetched or converted the first time)")
    # Importing torch and transformers takes seconds, and most commands do not need them.
    from workers.model.model_files import resolve_model_directory

    where = section.path, cache_directory, section.revision, report
    return resolve_model_directory(*where, stored=is_stored, drawn=is_drawn)


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
