"""Fetches files of a hub repository, and finds the directory of a draft: a local one, or such files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster.core.errors import ModelLoadError

_CONFIGURATION = ["config.json", "tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt"]
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json", "mask_embedding.pt"]
_TORCH_WEIGHTS = ["pytorch_model*.bin", "*_lm_head.pt"]
"""Fetched where a repository has no safetensors."""


def draft_directory(path: str, revision: str | None = None) -> Path:
    """The directory of the draft `path`, which is a local directory or a hub id such as `owner/name`.

    Blocks while it is fetched. Raises `ModelLoadError`.
    """
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory.resolve()
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ModelLoadError(f"draft {path!r}: no such directory; give a directory or a hub id (owner/name)")
    what = f"draft {path!r}"
    found = fetch(what, path, revision, [*_CONFIGURATION, *_WEIGHTS])
    if any(found.glob("*.safetensors")):
        return found
    return fetch(what, path, revision, [*_CONFIGURATION, *_TORCH_WEIGHTS])


def fetch(what: str, repository: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Fetch the files of a hub repository that match a pattern, and return their directory.

    `what` begins the message of an error. Raises `ModelLoadError`, whatever goes wrong.
    """
    # Importing this takes a while, and local drafts need no hub.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # errors of its HTTP client and of its storage have no class in common
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(f"{what}: it cannot be downloaded from the model hub: {reason}") from error
