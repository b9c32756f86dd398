"""Finds the directory of a draft: a local one, or the files of a hub repository that make a draft."""

from __future__ import annotations

from pathlib import Path

from cluster.core.errors import ModelLoadError

_CONFIGURATION = ["config.json", "tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt"]
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
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
    # Importing this takes a while, and local drafts need no hub.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        found = Path(snapshot_download(path, revision=revision, allow_patterns=[*_CONFIGURATION, *_WEIGHTS]))
        if not any(found.glob("*.safetensors")):
            found = Path(snapshot_download(path, revision=revision, allow_patterns=[*_CONFIGURATION, *_TORCH_WEIGHTS]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(f"draft {path!r}: it cannot be downloaded from the model hub: {error}") from error
    return found
