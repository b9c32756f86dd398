"""Fetches files of a hub repository, and finds the directory of a draft: a local one, or such files."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from os.path import expanduser
from pathlib import Path
from typing import Any

from cluster.core.errors import ModelLoadError
from workers.model.draft_card import EARLIER_CARD
from workers.model.public_shapes import Sizes

Report = Callable[[str], None]
"""Called with a short description whenever another percent is fetched."""

_CONFIGURATION = ["config.json", EARLIER_CARD, "tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt"]
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json", "mask_embedding.pt"]
_TORCH_WEIGHTS = ["pytorch_model*.bin", "*_lm_head.pt"]
"""Fetched where a repository has no safetensors."""
_OTHER_FORMS = ["consolidated*.safetensors", "*/*.safetensors"]
"""Weights that a repository has a second time, for other libraries: nothing here reads them."""


def _silent(_: str) -> None:
    pass


def draft_directory(path: str, revision: str | None = None, report: Report = _silent) -> Path:
    """The directory of the draft `path`, which is a local directory or a hub id such as `owner/name`.

    Blocks while it is fetched. Raises `ModelLoadError`.
    """
    directory = local_directory(path)
    if directory is not None:
        return directory
    what = _named(path)
    found = fetch(what, path, revision, [*_CONFIGURATION, *_WEIGHTS], report)
    if any(found.glob("*.safetensors")):
        return found
    return fetch(what, path, revision, [*_CONFIGURATION, *_TORCH_WEIGHTS], report)


def draft_description(path: str, revision: str | None = None) -> tuple[Path, Sizes | None]:
    """What tells the format of the draft `path`: a directory with its configuration, and the sizes of its tensors.

    Of a hub repository, the configuration and the headers of its safetensors files are fetched, and no weights. The
    sizes are `None` where the directory has the weights: a local one, or a repository whose weights are of torch or
    whose headers cannot be read, which is fetched. Raises `ModelLoadError`.
    """
    directory = local_directory(path)
    if directory is not None:
        return directory, None
    found = fetch(_named(path), path, revision, _CONFIGURATION)
    sizes = _remote_sizes(path, revision)
    return (found, sizes) if sizes else (draft_directory(path, revision), None)


def local_directory(path: str) -> Path | None:
    """The local directory `path`; `None` for a hub id. Raises `ModelLoadError` for what is neither."""
    directory = Path(expanduser(path))
    if directory.is_dir():
        return directory.resolve()
    if directory.is_file():
        whole = "; a .gguf file is a draft model: set draft.method=model and draft.model.path to it"
        raise ModelLoadError(
            f"draft {path!r}: it is a file; give a directory or a hub id (owner/name)"
            + whole * (directory.suffix == ".gguf")
        )
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ModelLoadError(f"draft {path!r}: no such directory; give a directory or a hub id (owner/name)")
    return None


def fetch(what: str, repository: str, revision: str | None, patterns: Sequence[str], report: Report = _silent) -> Path:
    """Fetch the files of a hub repository that match a pattern, and return their directory.

    `what` begins the message of an error. Raises `ModelLoadError`, whatever goes wrong.
    """
    # Importing this takes a while, and local drafts need no hub.
    from huggingface_hub import snapshot_download

    try:
        bar = _reporting_bar(repository, report)
        found = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=_OTHER_FORMS,
            tqdm_class=bar,
        )
        return Path(found)
    except Exception as error:  # errors of its HTTP client and of its storage have no class in common
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(f"{what}: it cannot be downloaded from the model hub: {reason}") from error


def _named(path: str) -> str:
    return f"draft {path!r}"


def _remote_sizes(repository: str, revision: str | None) -> Sizes | None:
    """The sizes of all tensors, from the headers of the safetensors files; `None` where they cannot be read."""
    from huggingface_hub import HfApi

    hub, found = HfApi(), Sizes()
    try:
        for name in hub.list_repo_files(repository, revision=revision):
            if fnmatch(name, "*.safetensors") and not any(fnmatch(name, other) for other in _OTHER_FORMS):
                header = hub.parse_safetensors_file_metadata(repository, name, revision=revision)
                found |= {tensor: tuple(info.shape) for tensor, info in header.tensors.items()}
    except Exception:  # as in `fetch`; offline, what the cache has is taken
        return None
    return found


def _reporting_bar(repository: str, report: Report) -> type:
    """A progress bar for the hub's client that writes nothing, and reports how much of all files is fetched."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[misc] # it has no types
        monitor_interval = 0

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self._percent = -1
            # One bar counts files; of the two that count bytes, one counts those on the network alone.
            self._counts = options.get("unit") == "B" and options.get("desc") != "Downloading bytes"
            super().__init__(*arguments, **options | {"disable": False, "file": io.StringIO()})

        def display(self, *_: Any, **__: Any) -> None:
            if not self._counts or not self.total:
                return
            percent = int(100 * self.n / self.total)
            if percent != self._percent:
                self._percent = percent
                report(f"fetching {repository}: {self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB")

    return Bar
