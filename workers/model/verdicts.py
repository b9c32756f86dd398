"""What was found of a model when it was loaded, kept in the directory of the compiled kernels for later starts.

A file's name covers all that the finding depends on, so whatever changes is found again.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from cluster.core.config.model_section import ModelSection
from cluster.core.errors import ModelLoadError
from workers.forward.code_folder import folder_fault, is_private_file, make_private_folder
from workers.model.kept_files import code_digest, model_state

logger = logging.getLogger(__name__)

FOLDER = "trials"
_SETTINGS = frozenset({"dtype", "load_format", "max_context_len", "quantization", "enable_expert_parallel"})


def verdict_file(
    section: ModelSection, ranks: int, device: torch.device, further: Mapping[str, Any] | None = None
) -> Path | None:
    """Where a verdict on a model is kept; `None` for one that is not. `further` is what else it depends on, as JSON."""
    if section.compile_directory is None:
        return None
    try:
        weights, states = model_state(section)
    except (OSError, ModelLoadError):  # loading the model says what is wrong
        return None
    settings = section.model_dump(mode="json", include=set(_SETTINGS))
    is_cpu = device.type == "cpu"
    processor = torch.backends.cpu.get_cpu_capability() if is_cpu else torch.cuda.get_device_name(device)
    parts = [weights, states, settings, ranks, device.type, processor, code_digest()]
    parts += [torch.__version__, version("transformers"), dict(further or {})]
    key = blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
    return Path(section.compile_directory) / FOLDER / f"{key}.json"


def read_verdict(file: Path | None) -> dict[str, Any] | None:
    """What is kept in `file`; `None` if nothing is, or if somebody else may have written it."""
    try:
        if file is None or not is_private_file(file):
            return None
        if any(folder_fault(folder) is not None for folder in (file.parent, file.parent.parent)):
            return None
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def keep_verdict(file: Path | None, verdict: Mapping[str, Any]) -> None:
    """Keep what was found, unless `file` is `None`. Without it, the next start finds it again."""
    if file is None:
        return
    try:
        make_private_folder(file.parent.parent)
        make_private_folder(file.parent)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(dict(verdict)), "utf-8")
        partial.chmod(0o600)  # whatever the umask is
        partial.replace(file)
    except OSError as error:
        logger.info("the verdict on %s is not kept: %s", verdict.get("model"), error)
