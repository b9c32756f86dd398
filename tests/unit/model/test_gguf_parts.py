"""A GGUF model in several files is the model of the one file that they were divided from."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cluster.core.config.model_section import ModelSection
from cluster.core.errors import ModelLoadError
from deploy.doctor.models import model_finding
from tests.support.models import stored_gguf, tiny, whole_gguf
from workers.model.kept_files import model_state
from workers.model.model_files import resolve_model_directory
from workers.model.stored.gguf_file import GgufFile
from workers.model.stored.source import stored_file

PARTS = 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file, and beside it the parts that it was divided into."""
    file = whole_gguf.write(tmp_path_factory.mktemp("gguf"), "llama")
    assert len(whole_gguf.divide(file, PARTS)) == PARTS
    return file


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> list[Path]:
    """Copies of the parts, without the whole file."""
    found = sorted(whole.parent.glob("model-*.gguf"))
    return [Path(shutil.copy(part, tmp_path)) for part in found]


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.name != "stored_in.txt"}


@pytest.mark.parametrize("number", range(PARTS))
def test_any_part_is_converted_to_the_bytes_of_the_whole_model(number: int, whole: Path, parts: list[Path]) -> None:
    cache = parts[0].parent / "cache"
    converted = resolve_model_directory(str(parts[number]), cache)
    assert contents(converted) == contents(resolve_model_directory(str(whole), cache / "whole"))
    assert stored_file(converted) == parts[0]
    assert re.fullmatch(r"model-[0-9a-f]{12}", converted.name)
    assert sorted(cache.iterdir()) == sorted([converted, cache / "whole"])


@pytest.mark.parametrize("number", range(PARTS))
def test_stored_matrices_are_read_from_the_parts_that_have_them(number: int, whole: Path, parts: list[Path]) -> None:
    model = AutoModelForCausalLM.from_config(whole_gguf.FAMILIES["llama"][1])
    found, expected = GgufFile(parts[number]), GgufFile(whole)
    assert found.sizes() == expected.sizes()
    for name, values in model.state_dict().items():
        if values.dim() == 1:
            assert torch.equal(found.vector(name), expected.vector(name)), name
        else:
            assert torch.equal(found.matrix(name).dequantized(), expected.matrix(name).dequantized()), name


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_part_that_is_missing_is_named_with_its_number(missing: int, parts: list[Path]) -> None:
    parts[missing - 1].unlink()
    named = parts[missing % PARTS]
    message = rf"model-0000{missing}-of-00003\.gguf': found no part {missing} of 3; needed all parts"
    with pytest.raises(ModelLoadError, match=message):
        resolve_model_directory(str(named), parts[0].parent / "cache")
    assert f"no part {missing} of 3" in model_finding("target.path", str(named), Path("cache")).found
    with pytest.raises(ModelLoadError, match=rf"model-0000{missing}-of-00003\.gguf"):
        GgufFile(named)


def test_a_part_with_the_name_of_another_is_refused(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    message = r"model-00003-of-00003\.gguf is part 2 of 3; its name must end with -00002-of-00003\.gguf"
    with pytest.raises(ModelLoadError, match=message):
        resolve_model_directory(str(parts[0]), parts[0].parent / "cache")


def test_a_part_with_another_kind_of_name_is_refused(parts: list[Path]) -> None:
    file = parts[0].rename(parts[0].with_name("first.gguf"))
    with pytest.raises(ModelLoadError, match=r"first\.gguf is part 1 of 3; its name must end with -00001-of-00003"):
        resolve_model_directory(str(file), file.parent / "cache")


@pytest.mark.parametrize(
    ("taken", "message"),
    [(0, r"two parts have the tensor 'blk\."), (2, r"3 parts have \d+ tensors together; they must have \d+")],
)
def test_parts_of_two_models_are_refused(taken: int, message: str, parts: list[Path], tmp_path: Path) -> None:
    deeper = tiny.llama(num_hidden_layers=4)
    other = tmp_path / "other" / "model.gguf"
    other.parent.mkdir()
    stored_gguf.write(AutoModelForCausalLM.from_config(deeper), other, "llama", {}, "F32")
    shutil.copy(whole_gguf.divide(other, PARTS)[taken], parts[taken])
    with pytest.raises(ModelLoadError, match=message):
        resolve_model_directory(str(parts[0]), tmp_path / "cache")


def test_a_change_of_any_part_makes_another_model(parts: list[Path]) -> None:
    cache = parts[0].parent / "cache"
    first = resolve_model_directory(str(parts[0]), cache)
    section = ModelSection(path=str(first), quantization="stored")
    state = model_state(section)
    parts[2].touch()
    assert model_state(section) != state
    assert resolve_model_directory(str(parts[0]), cache) != first
    assert AutoConfig.from_pretrained(first).num_hidden_layers == 2
