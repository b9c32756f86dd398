"""A GGUF model that stays as it is stored is prepared from its header, and serves what its conversion does."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cluster.core.config.sections import Configuration
from cluster.core.errors import ModelLoadError
from deploy import models
from deploy.bench.contestants.peers import load_target
from deploy.distillation import eagle3
from deploy.doctor.models import model_findings
from deploy.settings import load_settings
from tests.support.engines.stored_model import TEXT, load, logits
from tests.support.models import stored_gguf, whole_gguf
from workers.distill import target_model
from workers.distill.stored_target import load_parts
from workers.forward.loaded_model import LoadedModel
from workers.model.draft_card import DraftDescription
from workers.model.fingerprint import weights_digest
from workers.model.model_files import resolve_model_directory
from workers.model.stored.source import STORED_IN, stored_file
from workers.model.target_ends import outline, read_shared_ends
from workers.model.weight_counts import count_layers, count_weights
from workers.serve.configuration import load_configuration

TOKENS = 12
MIB = 1 << 20


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of compiled kernels, for all tests of this file."""
    return str(tmp_path_factory.mktemp("code"))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a GGUF file, and a cache with what both ways make of it."""
    directory = tmp_path_factory.mktemp("both")
    prepare(whole_gguf.write(directory, "llama"), directory / "cache")
    return directory


def prepare(file: Path, cache: Path) -> tuple[Path, Path]:
    """The directory without weights, and the converted one."""
    described, converted = (resolve_model_directory(str(file), cache, stored=stored) for stored in (True, False))
    return described, converted


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.suffix != ".safetensors"}


def greedy(model: LoadedModel) -> list[int]:
    text = TEXT[:8]
    for _ in range(TOKENS):
        text = (*text, int(logits(model, text)[-1].argmax()))
    return list(text)


@pytest.mark.parametrize("family", whole_gguf.FAMILIES)
def test_both_directories_have_the_same_files_and_serve_the_same_tokens(family: str, code: str, tmp_path: Path) -> None:
    described, converted = prepare(whole_gguf.write(tmp_path, family), tmp_path / "cache")
    assert contents(described) == contents(converted)
    assert not list(described.glob("*.safetensors"))
    assert AutoConfig.from_pretrained(described).model_type.startswith(whole_gguf.FAMILIES[family][0])
    ours, theirs = load(described, code), load(converted, code)
    assert torch.equal(logits(ours, TEXT), logits(theirs, TEXT))
    assert greedy(ours) == greedy(theirs)


def test_parts_are_described_as_the_whole_file(code: str, both: Path, tmp_path: Path) -> None:
    parts = [shutil.copy(part, tmp_path) for part in whole_gguf.divide(both / "model.gguf", 3)]
    described = resolve_model_directory(str(parts[1]), tmp_path / "cache", stored=True)
    whole = resolve_model_directory(str(both / "model.gguf"), both / "cache", stored=True)
    assert stored_file(described) == Path(parts[0])
    assert {name: text for name, text in contents(described).items() if name != STORED_IN} == {
        name: text for name, text in contents(whole).items() if name != STORED_IN
    }
    assert torch.equal(logits(load(described, code), TEXT), logits(load(whole, code), TEXT))
    Path(parts[2]).unlink()
    with pytest.raises(ModelLoadError, match=r"model-00003-of-00003\.gguf"):
        load(described, code)


@pytest.mark.parametrize("count", [1, 3])
def test_files_may_be_links_to_files_of_other_names(count: int, code: str, both: Path, tmp_path: Path) -> None:
    """The cache of Hugging Face's hub has them: the names of parts are those of the links."""
    parts = whole_gguf.divide(both / "model.gguf", count) if count > 1 else [both / "model.gguf"]
    for number, part in enumerate(parts):
        shutil.copy(part, tmp_path / f"blob{number}")
        (tmp_path / Path(part).name).symlink_to(f"blob{number}")
    named = str(tmp_path / Path(parts[0]).name)
    described, converted = prepare(Path(named), tmp_path / "cache")
    assert weights_digest(described)
    assert torch.equal(logits(load(described, code), TEXT), logits(load(converted, code), TEXT))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the most memory that a process has held")
def test_no_number_of_a_matrix_is_read(tmp_path: Path) -> None:
    """The file says that it has 6 GiB, in holes that take no room until they are read."""
    file, inner, hidden = tmp_path / "large.gguf", 1 << 20, 1024
    writer = gguf.GGUFWriter(file, "llama")
    for key, value in {"block_count": 1, "embedding_length": hidden, "feed_forward_length": inner}.items():
        writer.add_uint32(f"llama.{key}", value)
    for key, value in {"context_length": 64, "attention.head_count": 8, "attention.head_count_kv": 8}.items():
        writer.add_uint32(f"llama.{key}", value)
    for key, text in whole_gguf.tokenizer_keys("llama").items():
        stored_gguf.add_key(writer, key, text)
    size = 0
    for name, shape in {"ffn_up": (inner, hidden), "ffn_gate": (inner, hidden), "ffn_down": (hidden, inner)}.items():
        kind = gguf.GGMLQuantizationType.F16
        writer.add_tensor_info(f"blk.0.{name}.weight", shape, np.dtype(np.float16), 2 * inner * hidden, kind)
        size += 2 * inner * hidden
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with file.open("ab") as stream:
        stream.truncate(stream.tell() + size + 64)
    resolve_model_directory(str(file), tmp_path / "first", stored=True)  # libraries are loaded

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _peak_bytes()
    resolve_model_directory(str(file), tmp_path / "cache", stored=True)

    assert size == 6 << 30
    assert _peak_bytes() - before < 100 * MIB


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


@pytest.mark.parametrize("family", ["llama", "llama, tied"])
def test_drafts_share_the_ends_of_the_file(family: str, tmp_path: Path) -> None:
    described, converted = prepare(whole_gguf.write(tmp_path, family), tmp_path / "cache")
    config = AutoConfig.from_pretrained(described)
    card = SimpleNamespace(target_vocabulary_size=config.vocab_size, hidden_size=config.hidden_size, source="a card")
    found, expected = (
        read_shared_ends(directory, cast("DraftDescription", card)).tensors for directory in (described, converted)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[end], expected[end]) for end in expected)


def test_whoever_reads_a_models_weights_reads_those_of_the_file(both: Path) -> None:
    described, converted = prepare(both / "model.gguf", both / "cache")
    assert count_weights(described) == count_weights(converted)
    assert count_layers(described) == 2
    parts = [load_parts(directory, torch.device("cpu"), torch.float32, [1]) for directory in (described, converted)]
    configurations = [load_configuration({}, {"target.path": str(directory)}) for directory in (described, converted)]
    wholes = [load_target(configuration) for configuration in configurations]
    for found, expected in (parts, wholes):
        own = expected.state_dict()
        for name, values in found.state_dict().items():
            assert values.is_meta == own[name].is_meta, name
            assert values.is_meta or torch.equal(values, own[name]), name
    assert outline(AutoConfig.from_pretrained(described)).shapes.keys() == wholes[0].state_dict().keys()


def test_drafts_are_trained_for_the_numbers_of_the_file(both: Path, tmp_path: Path) -> None:
    described, converted = prepare(both / "model.gguf", both / "cache")
    found, expected = (target_model.load_target(one, torch.device("cpu"), "auto") for one in (described, converted))
    own = expected.state_dict()
    assert found.state_dict().keys() == own.keys()
    assert all(torch.equal(values, own[name]) for name, values in found.state_dict().items())
    assert found.dtype == expected.dtype
    assert found.config._attn_implementation == "sdpa"
    assert found.generation_config.eos_token_id == expected.generation_config.eos_token_id
    (tmp_path / "prompts.jsonl").write_text('{"question": "What is one?"}\n')
    words = ["--target", str(described), "--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out")]
    run = eagle3.Run(eagle3.options([*words, "--steps", "1", "--device", "cpu"]), lambda _: None)
    assert run.directory == described


def test_a_number_of_the_file_changes_the_digest(tmp_path: Path) -> None:
    file = whole_gguf.write(tmp_path, "llama")
    described = resolve_model_directory(str(file), tmp_path / "cache", stored=True)
    digest = weights_digest(described)
    content = bytearray(file.read_bytes())
    tensor = gguf.GGUFReader(file).tensors[3]
    content[tensor.data_offset + tensor.n_bytes // 2] ^= 1
    file.write_bytes(content)
    assert weights_digest(described) != digest


def test_a_directory_without_weights_is_refused_where_they_are_needed(both: Path) -> None:
    described, _ = prepare(both / "model.gguf", both / "cache")
    values = {"target.path": str(described), "target.quantization": "none"}
    (finding,) = model_findings(load_configuration({}, values | {"draft.method": "none"}), both / "cache")
    assert "no .safetensors file" in finding.found
    values |= {"target.quantization": "stored"}
    (finding,) = model_findings(load_configuration({}, values | {"draft.method": "none"}), both / "cache")
    assert not finding.is_problem
    assert resolve_model_directory(str(described), both / "cache", stored=True) == described
    with pytest.raises(ModelLoadError, match=r"found no \.safetensors file"):
        resolve_model_directory(str(described), both / "cache")


def test_what_is_not_read_as_it_is_stored_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    model = AutoModelForCausalLM.from_config(whole_gguf.FAMILIES["llama"][1])
    stored_gguf.write(model, file, "starcoder2", {}, "F32", without="gate_proj")
    with pytest.raises(ModelLoadError, match="architecture 'starcoder2' is not read as it is stored"):
        resolve_model_directory(str(file), tmp_path / "cache", stored=True)
    keys = {"tokenizer.ggml.tokens": ["a", "b"]}
    stored_gguf.write(model, file, "llama", {}, "F32", keys=keys, without=".")
    with pytest.raises(ModelLoadError, match="a GGUF file with a model"):
        resolve_model_directory(str(file), tmp_path / "cache", stored=True)
    assert not list((tmp_path / "cache").iterdir())


def test_more_layers_than_tensors_are_refused_before_they_are_made(tmp_path: Path) -> None:
    file = whole_gguf.write(tmp_path, "llama")
    content = file.read_bytes()
    place = content.index(b"llama.block_count") + len(b"llama.block_count") + 4
    file.write_bytes(content[:place] + (1000).to_bytes(4, "little") + content[place + 4 :])
    with pytest.raises(ModelLoadError, match=r"cannot be prepared: it has 1000 layers and \d+ tensors"):
        resolve_model_directory(str(file), tmp_path / "cache", stored=True)


@pytest.mark.weights
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", pytest.param("gemma-3-270m", marks=pytest.mark.slow)])
def test_a_packaged_model_serves_the_same_tokens(name: str, code: str, tmp_path: Path) -> None:
    def directory(quantization: str, cache: Path) -> Path:
        values = {"target.path": name, "target.quantization": quantization, "draft.method": "none"}
        configuration: Configuration = load_configuration({}, values)
        return models.resolve_models(configuration, cache, lambda _: None).target

    described, converted = directory("stored", tmp_path), directory("none", load_settings().cache_directory)
    assert described == tmp_path / "stored" / name
    own = {key: text for key, text in contents(described).items() if key != name}
    assert own == {key: text for key, text in contents(converted).items() if key != name}
    assert directory("stored", tmp_path) == described
    assert greedy(load(described, code)) == greedy(load(converted, code))
