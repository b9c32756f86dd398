"""A distilled draft is loaded with the target's embedding and head, or refused with an error that names the mistake."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from cluster.core.config.model_section import ModelSection
from cluster.core.errors import ConfigurationError, ModelLoadError
from tests.support.engines.stored_model import TEXT, logits
from tests.support.models import distilled_draft, tiny
from workers.forward.loaded_model import LoadedModel
from workers.model import distilled
from workers.model.distilled import load_distilled_draft
from workers.model.draft_card import CARD, EARLIER_CARD, VOCABULARY, WEIGHTS, read_card
from workers.model.loading import load_model
from workers.model.weight_files import config_values

REDUCED = (2, 3, 17, 40, 41, 95)
NORM = "model.norm.weight"
KINDS = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "int4"))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "target", tiny.llama())


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the compiled kernels, which are built once."""
    return tmp_path_factory.mktemp("code")


Load = Callable[..., LoadedModel]


@pytest.fixture
def load(target: Path, code: Path) -> Load:
    def loaded(directory: Path, target_directory: Path | None = target, **settings: Any) -> LoadedModel:
        section = {"path": str(directory), "device": "cpu", "compile": "off", "compile_directory": str(code)}
        return load_model(ModelSection.model_validate(section | settings), target_directory=target_directory)

    return loaded


def test_a_draft_with_all_layers_computes_the_same_as_its_target(target: Path, load: Load, tmp_path: Path) -> None:
    draft, whole = load(distilled_draft.save(target, tmp_path / "draft")), load(target)
    assert draft.vocabulary is None
    assert draft.vocabulary_size == tiny.VOCABULARY
    assert draft.max_context_len == whole.max_context_len
    assert torch.equal(logits(draft, TEXT), logits(whole, TEXT))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize(("dtype", "quantization"), KINDS)
def test_a_reduced_head_has_the_rows_of_its_tokens(
    tied: bool, native: str, dtype: str, quantization: str, load: Load, tmp_path: Path
) -> None:
    target = tiny.save(tmp_path / "target", tiny.llama(tie_word_embeddings=tied))
    how = {"dtype": dtype, "quantization": quantization, "native": native, "target_directory": target}
    whole = load(distilled_draft.save(target, tmp_path / "whole", layers=(1,)), **how)
    reduced = load(distilled_draft.save(target, tmp_path / "reduced", layers=(1,), vocabulary=REDUCED), **how)
    assert (reduced.native is not None) == (native == "auto" and shutil.which("cc") is not None)
    assert len(reduced.layers) == 1
    assert reduced.vocabulary is not None
    assert reduced.vocabulary.tolist() == list(REDUCED)
    assert reduced.vocabulary_size == tiny.VOCABULARY
    torch.testing.assert_close(logits(reduced, TEXT), logits(whole, TEXT)[:, list(REDUCED)], rtol=1e-3, atol=1e-3)


def test_the_tokens_of_a_reduced_head_are_where_its_logits_are(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, columns of logits do not index tokens on the host."""
    draft = distilled_draft.save(target, tmp_path / "draft", layers=(1,), vocabulary=REDUCED)
    config, device = AutoConfig.from_pretrained(draft), torch.device("meta")
    monkeypatch.setattr(distilled, "_reduce_head", lambda *_: None)
    loaded = load_distilled_draft(draft, target, config, torch.float32, device, "sdpa")
    assert loaded.vocabulary is not None
    assert (loaded.vocabulary.device, loaded.vocabulary.shape) == (device, (len(REDUCED),))


def test_a_draft_may_be_of_another_family_than_its_target(load: Load, target: Path, tmp_path: Path) -> None:
    source = tiny.save(tmp_path / "gpt2", tiny.gpt2(tie_word_embeddings=False))
    draft = distilled_draft.save(target, tmp_path / "draft", vocabulary=REDUCED)
    weights = load_file(source / WEIGHTS)
    own = {name: values for name, values in weights.items() if "wte" not in name and "lm_head" not in name}
    save_file(own | {VOCABULARY: torch.tensor(REDUCED, dtype=torch.int32)}, draft / WEIGHTS)
    config = config_values(source) | {CARD: distilled_draft.stored_card(draft)}
    (draft / "config.json").write_text(json.dumps(config))
    found = logits(load(draft), TEXT)
    assert found.shape == (len(TEXT), len(REDUCED))
    assert found.isfinite().all()


def test_a_draft_without_its_target_is_refused(target: Path, load: Load, tmp_path: Path) -> None:
    draft = distilled_draft.save(target, tmp_path / "draft")
    with pytest.raises(ConfigurationError, match=r"draft\.model\.path.*target"):
        load(draft, target_directory=None)
    with pytest.raises(ModelLoadError, match="nowhere"):
        load(draft, target_directory=tmp_path / "nowhere")


def test_a_draft_of_another_target_is_refused(
    target: Path, load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    shutil.copytree(target, other)
    load(distilled_draft.save(target, tmp_path / "draft"), target_directory=other)
    assert "distilled from target, the target is other" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 3}, "format_version must be 1 or 2, not 3"),
        ({"target": None}, "target must be a name, not None"),
        ({"layers": [-1]}, "layers must be a list of layer numbers"),
        ({"hidden_size": True}, "hidden_size must be at least 1, not True"),
        ({"hidden_size": 64}, "hidden_size is 64 for the draft and 48 in its config.json"),
        ({"target_vocabulary_size": 90}, "target_vocabulary_size is 90 for the draft and 96 in"),
        ({"vocabulary_size": 97}, "vocabulary_size must be null or between 1 and 96, not 97"),
        ({"vocabulary_size": None}, "tensor 'vocabulary' must be present if and only if its card has vocabulary_size"),
        ({"vocabulary_size": 5}, r"'vocabulary' must be int32 \[5\], not torch.int32 \[6\]"),
    ],
)
def test_a_mistake_in_the_draft_card_is_named(
    change: dict[str, Any], message: str, target: Path, load: Load, tmp_path: Path
) -> None:
    draft = distilled_draft.save(target, tmp_path / "draft", vocabulary=REDUCED)
    distilled_draft.change_card(draft, change)
    with pytest.raises(ModelLoadError, match=message):
        load(draft)


@pytest.mark.parametrize("text", [None, "", "[]", "{", "{}", 100_000 * "["])
def test_a_directory_without_a_draft_card_is_refused_with_what_is_missing(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    lacks = "it has no config.json with the key pilotfish_draft, .* it must be a directory that `pilotfish distill`"
    with pytest.raises(ModelLoadError, match=f"draft directory '{tmp_path}': {lacks}"):
        read_card(tmp_path)


def test_a_draft_card_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"pilotfish_draft": 5}')
    with pytest.raises(ModelLoadError, match=r"config\.json': pilotfish_draft must be an object, not 5"):
        read_card(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", 100_000 * "["])
def test_a_file_of_an_earlier_version_that_is_not_an_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / EARLIER_CARD).write_text(text)
    with pytest.raises(ModelLoadError, match=f"{EARLIER_CARD}.*(cannot be read|it must be an object)"):
        read_card(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NORM: None}, r"lacks \['model.norm.weight'\] and has nothing in excess"),
        ({"lm_head.weight": torch.zeros(96, 48)}, r"lacks nothing and has \['lm_head.weight'\] in excess"),
        ({NORM: torch.zeros(47)}, r"model.norm.weight must be \[48\], not \[47\]"),
        ({VOCABULARY: None}, "'vocabulary' must be present if and only if"),
        ({VOCABULARY: torch.tensor([1, 2, 3, 4, 5, 6])}, "must be int32"),
        ({VOCABULARY: torch.tensor([1, 2, 3, 3, 5, 6], dtype=torch.int32)}, "ascending token ids from 0 to 95"),
        ({VOCABULARY: torch.tensor([-1, 2, 3, 4, 5, 6], dtype=torch.int32)}, "ascending token ids"),
        ({VOCABULARY: torch.tensor([1, 2, 3, 4, 5, 96], dtype=torch.int32)}, "ascending token ids"),
    ],
)
def test_wrong_weights_are_named(
    change: dict[str, torch.Tensor | None], message: str, target: Path, load: Load, tmp_path: Path
) -> None:
    draft = distilled_draft.save(target, tmp_path / "draft", vocabulary=REDUCED)
    changed = load_file(draft / WEIGHTS) | change
    save_file({name: values for name, values in changed.items() if values is not None}, draft / WEIGHTS)
    with pytest.raises(ModelLoadError, match=message):
        load(draft)


def test_weights_that_are_not_safetensors_are_refused(target: Path, load: Load, tmp_path: Path) -> None:
    draft = distilled_draft.save(target, tmp_path / "draft")
    (draft / WEIGHTS).write_bytes(b"not this")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load(draft)


def test_a_target_of_another_shape_is_refused(target: Path, load: Load, tmp_path: Path) -> None:
    other = tiny.save(tmp_path / "other", tiny.llama(hidden_size=24))
    with pytest.raises(
        ModelLoadError, match=r"hidden_size is 48 for the draft and 24 in the config.json of the target 'other'"
    ):
        load(distilled_draft.save(target, tmp_path / "draft"), target_directory=other)


def test_a_target_without_embedding_or_head_is_refused(target: Path, load: Load, tmp_path: Path) -> None:
    other = tmp_path / "target"
    shutil.copytree(target, other)
    weights = load_file(other / WEIGHTS)
    for end in ("lm_head.weight", "model.embed_tokens.weight"):
        del weights[end]
        save_file(weights, other / WEIGHTS)
        with pytest.raises(ModelLoadError, match=f"hold no {end}"):
            load(distilled_draft.save(target, tmp_path / "draft"), target_directory=other)
