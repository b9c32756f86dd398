"""A drafting method finds the packaged draft of the target by itself."""

from __future__ import annotations

import pytest

from cluster.core.errors import ConfigurationError
from deploy.packaged_drafts import packaged_drafts
from deploy.settings import load_settings


@pytest.mark.parametrize(
    ("method", "packaged"),
    [
        ("model", "smollm2-135m-draft"),
        ("heads", "smollm2-135m-heads"),
        ("blockwise", "smollm2-135m-heads"),
        ("block", "smollm2-135m-block"),
        ("eagle", "smollm2-135m-eagle"),
        ("recycling", "smollm2-135m-table"),
    ],
)
def test_a_method_without_a_path_loads_the_packaged_draft_of_the_target(method: str, packaged: str) -> None:
    loaded = load_settings("cpu", [f"draft.method={method}"], {}).configuration
    assert loaded.draft.model_extra[method].path == packaged


def test_a_translator_has_a_packaged_draft_of_its_own() -> None:
    loaded = load_settings("cpu", ["draft.method=model", "target.path=opus-mt-fr-en"], {}).configuration
    assert loaded.draft.model_extra["model"].path == "opus-mt-fr-en-draft"


def test_a_translator_has_no_heads_of_another_target() -> None:
    with pytest.raises(ConfigurationError, match=r"draft\.heads: path must be set"):
        load_settings("cpu", ["draft.method=heads", "target.path=opus-mt-fr-en"], {})


@pytest.mark.parametrize("name", sorted(packaged_drafts()))
def test_no_draft_was_trained_on_sources_for_research_alone(name: str) -> None:
    card = (packaged_drafts()[name] / "README.md").read_text("utf-8")
    command, _, _ = card.partition("## How it was made")[2].partition("\n## ")
    assert "multi30k_train" not in command
    assert "research and education only" not in card


def test_each_of_several_methods_finds_its_draft() -> None:
    draft = load_settings("cpu", ["draft.methods=[suffix, heads]"], {}).configuration.draft
    assert draft.modules["heads"].path == "smollm2-135m-heads"


def test_a_path_that_is_set_stays() -> None:
    draft = load_settings("cpu", ["draft.method=heads", "draft.heads.path=/mine"], {}).configuration.draft
    assert draft.modules["heads"].path == "/mine"


def test_a_target_without_a_packaged_draft_needs_a_path() -> None:
    with pytest.raises(ConfigurationError, match=r"draft\.heads: path must be set"):
        load_settings("cpu", ["draft.method=heads", "target.path=/another/model"], {})


def test_methods_that_are_not_selected_load_nothing() -> None:
    assert not load_settings("cpu", ["draft.method=suffix"], {}).configuration.draft.modules


@pytest.mark.parametrize("name", sorted(packaged_drafts()))
def test_the_card_of_a_draft_names_the_licence_and_the_source_of_its_target(name: str) -> None:
    card = (packaged_drafts()[name] / "README.md").read_text("utf-8")
    _, _, licences = card.partition("\n## Licences\n")
    target = licences.partition("- Target: ")[2].partition("\n- ")[0]
    assert "Apache-2.0" in target
    assert "package" in target
    assert "GGUF" in target or not name.startswith("smollm2")
