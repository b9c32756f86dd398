"""Keeps the packed weights of targets on disk, so that a target starts without reading and packing its model again.

The files lie in `packed` in the directory of the compiled kernels. A file's key covers all that its bytes depend on:
the model's files, the settings, the code that packs, the kernels, the processor, and the versions of torch and
`transformers`. It is written only after the trial has shown that the kernels compute the model's logits from these
bytes, so finding it stands for that trial.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from cluster.core.config.target_section import TargetSection
from workers.forward.loaded_model import LoadedModel
from workers.forward.native.build import kernel_identity, load_library
from workers.forward.native.decoder import NativeDecoder
from workers.kv.spec import LayerShape
from workers.model.devices import choose_device, may_be_native
from workers.model.draft_card import is_distilled
from workers.model.kept_files import code_digest, model_state
from workers.model.packed_weights.decoder_regions import DTYPES, from_regions, plain_angles, to_regions
from workers.model.packed_weights.region_file import PARTIAL, read_regions, write_regions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

FOLDER, SUFFIX = "packed", ".weights"
_ABANDONED_SECONDS = 3600.0
"""Age of a partial file whose writer is taken to be gone."""


def packed_file(section: TargetSection) -> Path | None:
    """Where the target's packed weights are kept; `None` for a target that the CPU kernels do not compute alone.

    Raises `ModelLoadError`, `ConfigurationError`.
    """
    directory = Path(section.path)
    if not directory.is_dir() or section.compile_directory is None or not section.packed_bytes:
        return None
    if section.load_format != "auto":
        return None
    if section.tensor_parallel > 1 or section.dtype not in DTYPES or is_distilled(directory):
        return None
    if not may_be_native(section, choose_device(section.device, 0), section.tensor_parallel):
        return None
    kernels = kernel_identity(section.compile_directory)
    if kernels is None:
        return None
    try:
        weights, states = model_state(section)
    except OSError:  # loading the model says what is wrong, if it needs the file
        return None
    parts = [
        weights,
        states,
        section.model_dump(mode="json", include={"dtype", "quantization", "max_context_len", "trial"}),
        [kernels, code_digest(), torch.__version__, version("transformers")],
    ]
    key = blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()
    return Path(section.compile_directory) / FOLDER / f"{key}{SUFFIX}"


def read_packed(section: TargetSection, file: Path) -> LoadedModel | None:
    """The target from `file`, its `packed_file`; `None` if there is none, or if it is damaged."""
    begun = time.perf_counter()
    found = read_regions(file, file.stem)
    library = None if found is None else load_library(section.compile_directory)
    if found is None or library is None:
        return None
    content, memory = found
    try:
        native = NativeDecoder(from_regions(content["decoder"], memory), library)
        model = LoadedModel(
            module=cast("PreTrainedModel", nn.Module()),
            name=Path(section.path).name,
            layers=tuple(LayerShape(**layer) for layer in content["layers"]),
            hidden_size=content["hidden_size"],
            vocabulary_size=content["vocabulary_size"],
            vocabulary_offset=0,
            max_context_len=content["max_context_len"],
            eos_token_ids=tuple(content["eos_token_ids"]),
            device=torch.device("cpu"),
            dtype=DTYPES[section.dtype],
            code_directory=section.compile_directory,
            native=native,
        )
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s: packed weights are refused and will be written again: %s", file, error)
        return None
    with suppress(OSError):
        os.utime(file)  # the files that were used last are kept
    logger.info("%d MB of packed weights read in %.2f s", len(memory) // 10**6, time.perf_counter() - begun)
    return model


def keep_packed(section: TargetSection, file: Path, model: LoadedModel) -> threading.Thread | None:
    """Write the weights of a model that passed its trial, in a thread. Returns it, or `None` if nothing is written.

    `file` is the target's `packed_file` from before the model was loaded. A model that changed meanwhile, perhaps by
    another link to it, is not kept. An error is logged: without the file, the next start packs the weights again.
    """
    native = model.native
    if not isinstance(native, NativeDecoder) or model.vocabulary is not None or packed_file(section) != file:
        return None
    writer = threading.Thread(target=_write, args=(file, section.packed_bytes, native, model), name="packed-weights")
    writer.start()
    return writer


def _write(file: Path, most_bytes: int, native: NativeDecoder, model: LoadedModel) -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # steps come first
    try:
        with torch.inference_mode():
            angles = plain_angles(native.packed.rotary, model.max_context_len)
        if angles is None:
            return
        decoder, regions = to_regions(native.packed, angles)
        size = sum(region.nbytes for region in regions)
        file.parent.mkdir(parents=True, exist_ok=True)
        if not _make_room(file, size, most_bytes):
            logger.info("no room for %d MB of packed weights in %s", size // 10**6, file.parent)
            return
        content = {
            "decoder": decoder,
            "layers": [asdict(layer) for layer in model.layers],
            "hidden_size": model.hidden_size,
            "vocabulary_size": model.vocabulary_size,
            "max_context_len": model.max_context_len,
            "eos_token_ids": model.eos_token_ids,
        }
        write_regions(file, file.stem, content, regions)
    except OSError as error:
        logger.info("packed weights are not kept, so the next start packs them again: %s", error)


def _make_room(file: Path, size: int, most_bytes: int) -> bool:
    """Delete files until `size` bytes fit, those first that were not used for longest. Returns whether they fit."""
    if size > min(most_bytes, shutil.disk_usage(file.parent).free // 2):
        return False
    others: list[tuple[float, int, Path]] = []
    for other in file.parent.iterdir():
        with suppress(FileNotFoundError):
            status = other.stat()
            if other.suffix == PARTIAL and time.time() - status.st_mtime > _ABANDONED_SECONDS:
                other.unlink()
            elif other.suffix in (SUFFIX, PARTIAL) and other != file:
                others.append((status.st_mtime, status.st_size, other))
    total = size + sum(taken for _, taken, _ in others)
    for _, taken, other in sorted(others):
        if total > most_bytes and other.suffix == SUFFIX:
            other.unlink(missing_ok=True)
            total -= taken
    return total <= most_bytes
