"""One path of a draft chooses the drafting method."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.core.errors import ConfigurationError, ModelLoadError
from deploy.models import resolve_models
from deploy.placement import Resources, plan
from deploy.ray import application
from deploy.settings import load_settings
from tests.support.models import drafting_modules, public_drafts, tiny
from tests.support.models.public_drafts import DRAFTED, LLAMA


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(num_hidden_layers=8))


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LLAMA | {"draft_vocab_size": len(DRAFTED)}
    return public_drafts.write(tmp_path_factory.mktemp("eagle3"), config, public_drafts.eagle3())


@pytest.mark.parametrize("config", ["cpu", "gpu"])
def test_the_format_of_a_draft_chooses_the_method(config: str, target: Path, eagle3: Path, tmp_path: Path) -> None:
    settings = load_settings(config, [f"target.path={target}", f"draft.path={eagle3}"], {})

    draft = settings.configuration.draft
    assert draft.name == "eagle"
    assert draft.modules["eagle"].path == str(eagle3)
    resolved = resolve_models(settings.configuration, tmp_path, lambda _: None).configuration
    assert resolved.draft.modules["eagle"].path == str(eagle3)


def test_the_draft_whose_matrix_the_target_applies_is_found_on_each_node(
    target: Path, eagle3: Path, tmp_path: Path
) -> None:
    """The fusion has the name of the draft, which is another directory on each node."""
    name = tmp_path / "name"
    name.symlink_to(eagle3)
    assignments = [f"target.path={target}", f"draft.path={name}", "draft.placement=drafter"]
    configuration = load_settings("cpu", assignments, {}).configuration

    sent = application._on_devices(configuration, plan(configuration, [Resources(2.0, 0, 1 << 34)]))
    assert sent.target.evidence.fusion == sent.draft.modules["eagle"].path == str(name)

    found = resolve_models(sent, tmp_path, lambda _: None).configuration
    assert found.target.evidence.fusion == found.draft.modules["eagle"].path == str(eagle3)


def test_a_draft_of_pilotfish_and_a_whole_model_choose_their_methods(target: Path, tmp_path: Path) -> None:
    drafting_modules.save(target, tmp_path, "heads", (2,))

    def method(path: Path, *more: str) -> str:
        return load_settings("cpu", [f"draft.path={path}", *more], {}).configuration.draft.name

    medusa = public_drafts.write(tmp_path / "medusa", {"medusa_num_heads": 3}, public_drafts.medusa())
    eagle = public_drafts.write(tmp_path / "eagle", LLAMA, public_drafts.eagle1(), "pytorch_model.bin")
    assert method(tmp_path) == method(medusa) == "heads"
    assert method(eagle) == "eagle"
    assert method(tmp_path, "draft.method=blockwise") == "blockwise"
    assert method(target) == "model"


def test_a_file_may_name_a_draft_and_the_command_line_another(target: Path, eagle3: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"draft": {"method": "ngram"}, "target": {"path": str(target)}}))
    assert load_settings(str(file), [f"draft.path={eagle3}"], {}).configuration.draft.name == "eagle"

    file.write_text(json.dumps({"draft": {"method": "ngram", "path": str(eagle3)}}))
    with pytest.raises(ConfigurationError, match="holds a draft for eagle, and the method is set to 'ngram'"):
        load_settings(str(file), (), {})


def test_a_draft_that_does_not_fit_the_method_is_refused(eagle3: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"draft.path: .* holds a draft for eagle, and the method is .*heads"):
        load_settings("cpu", [f"draft.path={eagle3}", "draft.method=heads"], {})


def test_a_path_that_is_no_draft_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds neither a draft nor a model: config.json is missing"):
        load_settings("cpu", [f"draft.path={tmp_path}"], {})
    with pytest.raises(ModelLoadError, match="no such directory; give a directory or a hub id"):
        load_settings("cpu", [f"draft.path={tmp_path / 'absent'}"], {})
    (tmp_path / "draft.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"it is a file; .*a .gguf file is a draft model: set draft.method=model"):
        load_settings("cpu", [f"draft.path={tmp_path / 'draft.gguf'}"], {})
