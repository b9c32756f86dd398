"""Where a directory has the same weights in several forms, every part reads the form that `transformers` loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cluster.core.errors import ModelLoadError
from deploy.preflight import weight_bytes
from tests.support.models import quantized, tiny
from workers.model.draft_card import DraftDescription
from workers.model.formats.checkpoint import Checkpoint
from workers.model.stored.quantized_checkpoint import stored_bytes
from workers.model.target_ends import read_shared_ends
from workers.model.weight_counts import count_weights
from workers.model.weight_files import weight_files

INDEX = "model.safetensors.index.json"


def shards(directory: Path) -> None:
    """Divide the file of a model in two."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = directory / f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file.name)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def with_other_forms(directory: Path, *, divided: bool) -> None:
    """Put other forms beside the weights: by another library's names, and another training's by the same names."""
    tensors = load_file(directory / "model.safetensors")
    if divided:
        shards(directory)
    others = {name: torch.zeros_like(value) for name, value in tensors.items()}
    save_file(others, directory / "other.safetensors", metadata={"format": "pt"})
    theirs = {name.replace("model.", "their."): value for name, value in others.items()}
    save_file(theirs, directory / "consolidated.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("divided", [False, True])
def test_counts_bytes_and_ends_are_those_of_the_weights_that_are_loaded(divided: bool, tmp_path: Path) -> None:
    plain = tiny.save(tmp_path / "plain", tiny.llama())
    directory = Path(shutil.copytree(plain, tmp_path / "model"))
    with_other_forms(directory, divided=divided)
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    card = DraftDescription("", tiny.VOCABULARY, 48, (), None)
    ends = read_shared_ends(directory, card).tensors
    assert torch.equal(ends["embedding", "weight"], loaded.get_input_embeddings().weight)
    assert torch.equal(ends["head", "weight"], loaded.lm_head.weight)
    assert loaded.lm_head.weight.any()
    assert count_weights(directory) == count_weights(plain)
    assert weight_bytes(directory, "float32") == weight_bytes(plain, "float32")
    assert Checkpoint(directory, {}).sizes == {name: tuple(one.shape) for name, one in loaded.state_dict().items()}


def test_bytes_of_quantized_weights_are_those_of_the_weights_that_are_loaded(tmp_path: Path) -> None:
    settings = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"}
    quantized.save(tiny.save(tmp_path / "plain", tiny.llama()), tmp_path / "model", quantized.awq(16), settings)
    found = stored_bytes(tmp_path / "model", "float32")
    with_other_forms(tmp_path / "model", divided=True)
    assert stored_bytes(tmp_path / "model", "float32") == found


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read"),
        ('{"weight_map": ["model.safetensors"]}', "cannot be read"),
        (
            '{"weight_map": {"a": "model-00003-of-00003.safetensors"}}',
            r"names 'model-00003-of-00003\.safetensors'; there",
        ),
        ('{"weight_map": {"a": "../plain/model.safetensors"}}', r"names '\.\./plain/model\.safetensors'; there"),
    ],
)
def test_an_index_without_its_files_is_refused(index: str, message: str, tmp_path: Path) -> None:
    plain = tiny.save(tmp_path / "plain", tiny.llama())
    directory = Path(shutil.copytree(plain, tmp_path / "model"))
    shards(directory)
    assert [file.name[6:11] for file in weight_files(directory)] == ["00001", "00002"]
    (directory / INDEX).write_text(index)
    with pytest.raises(ModelLoadError, match=rf"{INDEX} {message}"):
        weight_files(directory)


def test_a_draft_that_has_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"fc.weight": torch.zeros(2, 4)}, tmp_path / f"{name}.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint.read(tmp_path)
    with pytest.raises(ModelLoadError, match=r"fc\.weight is in two\.safetensors and in a file before it"):
        _ = checkpoint.sizes
