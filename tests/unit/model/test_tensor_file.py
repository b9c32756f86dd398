"""Tensors are written as safetensors reads them, and read; other threads run meanwhile."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file

from workers.model.formats.checkpoint import read_tensors
from workers.model.tensor_file import write_tensors


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    """Odd numbers of bytes come before no larger numbers, which would not be aligned."""
    tensors = {
        "bytes": torch.arange(7, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "float32": torch.randn(3, 5),
        "bfloat16": torch.randn(3, 5).bfloat16(),
        "transposed": torch.randn(4, 6).bfloat16().T,
        "long": torch.tensor([-1, 1 << 40]),
        "single": torch.tensor(2.5, dtype=torch.float64),
        "nothing": torch.empty(0, 3),
        "a part": torch.arange(10, dtype=torch.int32)[3:6],
    }
    with (tmp_path / "tensors").open("wb") as file:
        write_tensors(file, tensors, {"format": "pt"})
    found = load_file(tmp_path / "tensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        assert torch.equal(found[name], value), name
    with safe_open(tmp_path / "tensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    read = read_tensors(tmp_path / "tensors", tensors)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], value) and read[name].dtype is value.dtype for name, value in found.items())
    assert read_tensors(tmp_path / "tensors", ["long", "nothing of this name"]).keys() == {"long"}


def test_what_is_read_is_no_part_of_the_file(tmp_path: Path) -> None:
    """The file may become shorter: a process ends that reads what was mapped of it (SIGBUS)."""
    file, value = tmp_path / "tensors", torch.randn(1 << 16)
    with file.open("wb") as opened:
        write_tensors(opened, {"x": value, "y": value})
    found = read_tensors(file, ["x", "y"])
    assert str(file) not in Path("/proc/self/maps").read_text()
    os.truncate(file, file.stat().st_size - 1)
    assert torch.equal(found["x"], value) and torch.equal(found["y"], value)
    with pytest.raises(ValueError, match="y is beyond the end of the file"):
        read_tensors(file, ["x", "y"])
    assert torch.equal(read_tensors(file, ["x"])["x"], value)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]},
        {"dtype": "C64", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]},
        {"dtype": "F32", "shape": [1]},
        ["F32"],
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "tensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=r"its header is wrong|x takes|x is beyond"):
        read_tensors(tmp_path / "tensors", ["x"])


def test_another_thread_runs_while_tensors_are_written() -> None:
    """A pipe takes 64 KiB until this process reads it, in another thread: without the interpreter, it never would."""
    tensors, received = {"large": torch.randn(1 << 20)}, bytearray()
    source, sink = os.pipe()

    def receive() -> None:
        with os.fdopen(source, "rb") as file:
            received.extend(file.read())

    reader = threading.Thread(target=receive)
    reader.start()
    with os.fdopen(sink, "wb") as file:
        write_tensors(file, tensors)
    reader.join()
    assert torch.equal(load(bytes(received))["large"], tensors["large"])


def test_a_type_that_the_format_lacks_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "tensors").open("wb") as file, pytest.raises(ValueError, match="complex64 has no name"):
        write_tensors(file, {"x": torch.zeros(1, dtype=torch.complex64)})
