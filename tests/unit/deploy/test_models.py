"""Model names in a configuration are resolved to directories, for the target and for the draft."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.core.config.sections import Configuration
from cluster.core.errors import ModelLoadError
from deploy import models, packaged_drafts
from deploy.settings import load_settings
from tests.support.models import whole_gguf
from workers.model.draft_card import CARD
from workers.model.stored import gguf_file
from workers.serve.configuration import load_configuration


def model_directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return path


def drafted(target: Path, draft: str) -> Configuration:
    overrides = {"target.path": str(target), "draft.method": "model", "draft.model.path": draft}
    return load_configuration({}, overrides)


def test_directories_are_written_into_the_configuration(tmp_path: Path) -> None:
    target, draft = model_directory(tmp_path / "target"), model_directory(tmp_path / "draft")
    written = drafted(target, str(draft))

    found = models.resolve_models(written, tmp_path, lambda _: None)

    assert (found.target, found.draft) == (target, draft)
    assert found.configuration.target.served_name == "target"
    assert found.configuration.draft.weights is not None
    assert found.configuration.draft.weights.path == str(draft)
    assert found.configuration.draft.weights.compile_directory == str(tmp_path / "compiled")


def test_quantized_directories_are_served_as_they_are_stored(tmp_path: Path) -> None:
    target, draft = model_directory(tmp_path / "target"), model_directory(tmp_path / "draft")
    for directory in (target, draft):
        (directory / "config.json").write_text(
            '{"model_type": "llama", "quantization_config": {"quant_method": "awq"}}'
        )
    overrides = {"target.path": str(target), "draft.method": "model", "draft.model.path": str(draft)}
    stored = {"target.quantization": "stored", "draft.model.quantization": "stored"}

    found = models.resolve_models(load_configuration({}, overrides | stored), tmp_path / "cache", lambda _: None)

    assert (found.target, found.draft) == (target, draft)
    assert not (tmp_path / "cache").exists()


def test_a_packaged_draft_is_resolved_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged_drafts, "__file__", str(tmp_path / "packaged_drafts.py"))
    target, draft = model_directory(tmp_path / "t"), model_directory(tmp_path / "drafts" / "smollm2-135m-draft")
    (draft / "config.json").write_text(json.dumps({"model_type": "llama", CARD: {}}))
    written = drafted(target, "smollm2-135m-draft")

    assert models.resolve_models(written, tmp_path, lambda _: None).draft == draft


def test_a_module_that_is_no_draft_is_refused_with_the_packaged_names(tmp_path: Path) -> None:
    target = model_directory(tmp_path / "t")
    overrides = {"target.path": str(target), "draft.method": "heads", "draft.heads.path": str(tmp_path / "absent")}

    with pytest.raises(ModelLoadError, match=r"draft\.heads\.path: .*packaged ones are .*smollm2-135m-table"):
        models.resolve_models(load_configuration({}, overrides), tmp_path, lambda _: None)


def test_a_draft_model_that_the_method_does_not_load_is_not_resolved(tmp_path: Path) -> None:
    target = model_directory(tmp_path / "target")
    overrides = {"target.path": str(target), "draft.model.path": str(tmp_path / "absent"), "draft.method": "ngram"}
    looked: list[str] = []

    found = models.resolve_models(load_configuration({}, overrides), tmp_path, looked.append)

    assert found.draft is None
    assert not any("absent" in line for line in looked)


def test_a_converted_packaged_model_is_found_without_its_libraries(tmp_path: Path) -> None:
    values = {"target.path": "smollm2-135m-instruct", "target.quantization": "none", "draft.method": "none"}
    written = load_configuration({}, values)
    converted = model_directory(tmp_path / "smollm2-135m-instruct")

    assert models.resolve_models(written, tmp_path, pytest.fail).target == converted


def test_a_packaged_model_that_stays_as_it_is_stored_has_a_directory_without_weights(tmp_path: Path) -> None:
    overrides = {"target.path": "smollm2-135m-instruct", "draft.method": "none", "target.quantization": "stored"}
    model_directory(tmp_path / "smollm2-135m-instruct")  # converted by a start that did not keep it as it is stored
    described = tmp_path / "stored" / "smollm2-135m-instruct"
    described.mkdir(parents=True)
    (described / "config.json").write_text('{"model_type": "llama"}')

    assert models.resolve_models(load_configuration({}, overrides), tmp_path, pytest.fail).target == described


@pytest.mark.parametrize(
    ("path", "name"),
    [("/models/big", "big"), ("big.gguf", "big"), ("/models/big-00002-of-00003.gguf", "big"), ("owner/big", "big")],
)
def test_the_served_name_is_the_models(path: str, name: str) -> None:
    assert models.served_name(load_configuration({}, {"target.path": path})) == name
    named = load_configuration({}, {"target.path": path, "target.served_name": "other"})
    assert models.served_name(named) == "other"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "stored"),
        ({"target.tensor_parallel": 3}, "stored"),
        ({"target.tensor_parallel": 3, "target.device": "auto"}, "stored"),
        ({"target.quantization": "none"}, "none"),
        ({"target.quantization": "int8"}, "int8"),
        ({"target.path": "opus-mt-fr-en"}, "none"),
    ],
    ids=repr,
)
def test_the_cpu_preset_keeps_the_bits_of_a_packaged_model(
    settings: dict[str, object], expected: str, tmp_path: Path
) -> None:
    values = load_settings("cpu", environment={}).configuration.model_dump(mode="json", exclude_unset=True)
    for name in ("smollm2-135m-instruct", "opus-mt-fr-en"):
        model_directory(tmp_path / name)
    found = models.resolve_models(load_configuration(values, settings), tmp_path, lambda _: None)
    assert found.configuration.target.quantization == expected
    assert (found.target.parent == tmp_path / "stored") == (expected == "stored")


def test_a_gguf_file_is_kept_unless_its_architecture_is_not_read_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = whole_gguf.write(tmp_path, "qwen2")

    def resolved() -> Configuration:
        values = {"target.path": str(file), "draft.method": "none"}
        return models.resolve_models(load_configuration({}, values), tmp_path / "cache", lambda _: None).configuration

    assert resolved().target.quantization == "stored"
    assert not caplog.records
    monkeypatch.delitem(gguf_file._ARCHITECTURES, "qwen2")
    assert resolved().target.quantization == "none"
    assert "architecture 'qwen2' is not read as it is stored" in caplog.text
    assert f"instead of {file.stat().st_size / 1e9:.3g} GB as they are stored" in caplog.text
