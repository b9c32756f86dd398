"""Rows of files of prompts: JSONL, plain text, and data sets that the library `datasets` wrote with `save_to_disk`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.core.errors import ConfigurationError, shorten

logger = logging.getLogger(__name__)

_TEXT = ".txt"
_DATA_SET, _SPLITS = "state.json", "dataset_dict.json"
_TRAIN = "train"
"""The split that is read of several."""

Row = tuple[int, str, Mapping[str, Any]]
"""The number of a row in its file, from 1, where it is in words, and its values by their names."""


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file or of a data set, in order. A line of a `.txt` file is a `prompt`; blank lines are left out.

    So is, with a warning, an object at the end of a file that ends within it: its writer was killed, or writes it now.
    Raises `ConfigurationError`, which names the file, the line and what was found.
    """
    if path.is_dir():
        yield from _data_set_rows(path)
        return
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines() splits at more, such as U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"prompts {path}: needed a readable JSONL or text file; {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"prompts {path}, line {number}"
            if number == len(lines) and path.suffix != _TEXT and _is_cut(line):
                logger.warning("%s is left out: the file ends within it", where)
                return
            yield number, where, {"prompt": line.strip()} if path.suffix == _TEXT else _parsed(line, where)


def _is_cut(line: str) -> bool:
    """Whether a line begins an object that is not complete."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return line.startswith("{")
    return False


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: needed JSON; {error}") from None
    if not isinstance(row, dict):
        raise ConfigurationError(f"{where}: needed an object, found {shorten(row)}")
    return row


def _data_set_rows(directory: Path) -> Iterator[Row]:
    """The rows of a data set, or of its split `train`: streams of Arrow, which its `state.json` lists.

    A column that has no value in a row is left out of it.
    """
    number = 0
    for file in _data_files(directory):
        for batch in _batches(file, directory):
            for values in batch.to_pylist():
                number += 1
                row = {name: value for name, value in values.items() if value is not None}
                yield number, f"prompts {directory}, row {number}", row


def _data_files(directory: Path) -> list[Path]:
    if (directory / _SPLITS).exists():
        splits = _values(directory / _SPLITS).get("splits")
        if not isinstance(splits, list) or _TRAIN not in splits:
            raise ConfigurationError(
                f"prompts {directory}: needed the split {_TRAIN}, found {shorten(splits)}; name a split's directory"
            )
        directory /= _TRAIN
    if not (directory / _DATA_SET).exists():
        raise ConfigurationError(
            f"prompts {directory}: needed a file, or a directory that `save_to_disk` of `datasets` wrote"
        )
    state = _values(directory / _DATA_SET)
    try:
        return [directory / Path(file["filename"]).name for file in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise ConfigurationError(f"prompts {directory / _DATA_SET}: needed _data_files; {error!r}") from None


def _values(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"prompts {file}: needed JSON; {error}") from None
    if not isinstance(found, dict):
        raise ConfigurationError(f"prompts {file}: needed an object, found {shorten(found)}")
    return found


def _batches(file: Path, directory: Path) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import ipc
    except ImportError:
        raise ConfigurationError(f"prompts {directory}: pyarrow is not installed; run `pip install pyarrow`") from None
    try:
        with pyarrow.memory_map(str(file)) as source, ipc.open_stream(source) as stream:
            yield from stream
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigurationError(f"prompts {file}: needed a stream of Arrow; {error}") from None
