"""Where the weights of a GGUF model are stored: the file that its directory was made of.

It imports no `transformers`, so that a process that finds packed weights starts without it.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from cluster.core.errors import ModelLoadError
from workers.model.packaged.catalogue import PACKAGED_MODELS, packaged_file
from workers.model.weight_files import config_values, weight_files

STORED_IN = "stored_in.txt"
"""The file in a model's directory that names the GGUF file that the directory was made of."""

OF_PLAIN = "auto, none or int8"
"""Values of `target.quantization` for a model with plain weights."""


def write_stored_in(directory: Path, file: Path) -> None:
    """Note in `directory` which file it was made of. A link stays one: its name may be that of a part of the model."""
    (directory / STORED_IN).write_text(str(file.absolute()), "utf-8")


def stored_file(directory: Path) -> Path | None:
    """The GGUF file that the model in `directory` was made of, the first of several; `None` if it was not.

    Raises `ModelLoadError` if that file is gone.
    """
    note = directory / STORED_IN
    if note.is_file():
        file = Path(note.read_text("utf-8"))
        if not file.is_file():
            raise ModelLoadError(
                f"model directory {str(directory)!r}: the file {str(file)!r} that its weights are stored in is gone; "
                "put it back, or set target.quantization to none"
            )
        return file
    packaged = PACKAGED_MODELS.get(directory.name)
    if packaged is None or packaged.is_marian:
        return None
    if len(packaged.parts) == 1 and packaged.span is None:
        return packaged_file(directory.name, directory)
    joined = directory / directory.name
    if not joined.is_file():
        with TemporaryDirectory(dir=directory) as scratch:
            os.replace(packaged_file(directory.name, Path(scratch)), joined)  # other processes see a whole file or none
    return joined


def may_stay_stored(path: str) -> bool:
    """Whether a model on this machine has weights that may stay as they are stored; others are not looked at."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return "quantization_config" in config_values(directory) or stored_alone(directory) is not None
    packaged = PACKAGED_MODELS.get(path)
    return directory.suffix == ".gguf" if packaged is None else not packaged.is_marian


def is_plain(path: str) -> bool:
    """Whether a model on this machine has plain weights alone, so that none can stay as they are stored.

    A model that is converted from a GGUF file has others, in that file.
    """
    directory = Path(path).expanduser()
    if not directory.is_dir():
        return path in PACKAGED_MODELS and not may_stay_stored(path)
    try:
        return not config_values(directory).get("quantization_config") and stored_file(directory) is None
    except ModelLoadError:  # the file is gone: loading says so
        return False


def stored_alone(directory: Path) -> Path | None:
    """The GGUF file with the weights of a model whose directory has none; `None` for every other directory.

    Raises `ModelLoadError` if that file is gone.
    """
    return None if weight_files(directory) else stored_file(directory)
