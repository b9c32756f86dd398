"""The keys of a GGUF file have the values that the package `gguf` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from workers.model.gguf_header import GgufHeader, read_gguf

LONG = 3000
VALUES: dict[str, list[Any]] = {
    "texts": [f"token {number} \u00e4\u2581" for number in range(LONG)],
    "empty texts": [""] * LONG,
    "numbers": list(range(-LONG, LONG)),
    "fractions": [number / 8 for number in range(LONG)],
    "truths": [number % 3 == 0 for number in range(LONG)],
    "a few texts": ["a", "b"],
    "a few numbers": [3, 2, 1],
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, values in VALUES.items():
        writer.add_array(name, values)
        writer.add_string(f"after {name}", name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_long_and_short_arrays_have_the_values_of_the_file(file: Path) -> None:
    found, expected = GgufHeader(file).fields, gguf.GGUFReader(file).fields
    assert {name: field.contents() for name, field in found.items()} == {
        name: field.contents() for name, field in expected.items()
    }
    assert {name: found[name].contents() for name in VALUES} == VALUES
    assert found["texts"].contents(7) == VALUES["texts"][7]
    assert [field.types for field in found.values()] == [field.types for field in expected.values()]


def test_a_text_that_ends_after_the_file_is_refused(file: Path) -> None:
    content = file.read_bytes()
    place = content.index(b"token 2999") - 8
    file.write_bytes(content[:place] + (1 << 40).to_bytes(8, "little") + content[place + 8 :])
    with pytest.raises(ValueError, match=r"it names .* bytes and has"):
        read_gguf(file)
