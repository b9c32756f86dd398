"""The files of drafting modules are read back as they were, and every mistake in them is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.core.errors import ModelLoadError
from tests.support.models import distilled_draft, drafting_modules, tiny
from workers.model.draft_card import EARLIER_CARD, WEIGHTS, read_card
from workers.model.drafting.files import load_drafter
from workers.model.drafting.table import SuccessorTable
from workers.model.formats.registry import read_draft, read_weights

CPU = torch.device("cpu")
KINDS = ("heads", "block", "eagle", "exit", "table")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_module_is_read_back(target: Path, tmp_path: Path, kind: str) -> None:
    module = drafting_modules.save(target, tmp_path, kind, taps=(0, 2), vocabulary=range(50))

    loaded = load_drafter(tmp_path, target, torch.float32, CPU, kind)

    assert type(loaded.module) is type(module)
    assert loaded.card.kind == kind
    assert loaded.card.taps == (0, 2)
    assert loaded.card == read_card(tmp_path)
    for name, value in module.state_dict().items():
        stored = value.to(torch.bfloat16).float() if value.is_floating_point() else value
        assert torch.equal(loaded.module.state_dict()[name], stored), name
    assert len(loaded.ends.head) == 50


def test_only_the_modules_own_parameters_are_stored(target: Path, tmp_path: Path) -> None:
    drafting_modules.save(target, tmp_path, "heads")

    assert sorted(load_file(tmp_path / WEIGHTS)) == [
        "mix.inner.weight",
        "mix.outer.weight",
        "selector.inner.weight",
        "selector.outer.weight",
        "weights",
    ]


def test_int8_matrices_have_a_scale_for_each_row(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.model.drafting.files._LEAST_INT8", 1)
    module = drafting_modules.save(target, tmp_path, "block", int8=True)

    loaded = load_drafter(tmp_path, target, torch.float32, CPU)

    assert load_file(tmp_path / WEIGHTS)["fusion.proj.weight"].dtype is torch.int8
    for name, value in module.state_dict().items():
        largest = value.abs().amax(-1, keepdim=True)
        assert ((loaded.module.state_dict()[name] - value).abs() <= largest / 100).all(), name


def test_modules_are_loaded_in_the_asked_data_type(target: Path, tmp_path: Path) -> None:
    drafting_modules.save(target, tmp_path, "block")

    loaded = load_drafter(tmp_path, target, torch.bfloat16, CPU)

    assert {value.dtype for value in loaded.module.parameters()} == {torch.bfloat16}
    assert loaded.ends.head.dtype is torch.bfloat16


def test_a_deeper_target_of_the_same_width_can_be_used(target: Path, tmp_path: Path) -> None:
    drafting_modules.save(target, tmp_path / "draft", "heads", taps=(2,))
    deeper = tiny.save(tmp_path / "deeper", tiny.llama(num_hidden_layers=5))

    assert load_drafter(tmp_path / "draft", deeper, torch.float32, CPU).card.taps == (2,)


def test_a_table_gives_the_successors_of_tokens(target: Path, tmp_path: Path) -> None:
    module = drafting_modules.save(target, tmp_path, "table", taps=())
    assert isinstance(module, SuccessorTable)
    module.successors[7] = torch.tensor([3, 9, 4, -1])

    assert module(torch.tensor([[7]])).tolist() == [[[3, 9, 4, -1]]]
    assert module(torch.tensor([8])).tolist() == [[-1] * 4]


class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"kind": "medusa"}, "kind must be one of layers, heads, block, eagle, exit, table, not 'medusa'"),
            ({"taps": [-1]}, r"taps must be a list of layer numbers, not \[-1\]"),
            ({"shape": None}, "shape: None is refused; it must be an object"),
            ({"shape": {"depths": 2}}, r"shape: lacks \['mix_rank', 'selector_rank'\] and has 'nothing' in excess"),
            (
                {"shape": {"depths": 0, "mix_rank": 0, "selector_rank": 0}},
                "depths: 0 is refused; it must be at least 1",
            ),
            ({"shape": {"depths": "2", "mix_rank": 0, "selector_rank": 0}}, "shape.depths: '2' is refused; .* be int"),
            ({"hidden_size": 32}, "hidden_size is 32 for the draft and 48 in the config.json of the target"),
            ({"tree": [[0], [1, 0]]}, r"tree must be .* each after its parent, not \[1, 0\]"),
            ({"tree": [[16]]}, r"tree must be at most 256 lists of ranks below 16"),
            ({"format_version": 3}, "format_version must be 1 or 2, not 3"),
        ],
    )
    def test_a_wrong_card(self, target: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
        drafting_modules.save(target, tmp_path, "heads")
        distilled_draft.change_card(tmp_path, changes)

        with pytest.raises(ModelLoadError, match=message):
            load_drafter(tmp_path, target, torch.float32, CPU)

    def test_a_module_of_another_kind(self, target: Path, tmp_path: Path) -> None:
        drafting_modules.save(target, tmp_path, "heads")

        with pytest.raises(ModelLoadError, match=r"kind is 'heads'; needed block"):
            load_drafter(tmp_path, target, torch.float32, CPU, "block")

    def test_a_draft_that_is_a_model_of_its_own_layers(self, target: Path, tmp_path: Path) -> None:
        distilled_draft.save(target, tmp_path)

        with pytest.raises(ModelLoadError, match=r"kind is 'layers'; needed a drafting module"):
            load_drafter(tmp_path, target, torch.float32, CPU)

    def test_missing_and_strange_tensors(self, target: Path, tmp_path: Path) -> None:
        drafting_modules.save(target, tmp_path, "heads")
        tensors = load_file(tmp_path / WEIGHTS)
        tensors["other"] = tensors.pop("weights")
        save_file(tensors, tmp_path / WEIGHTS)

        with pytest.raises(ModelLoadError, match=r"lacks \['weights'\] and has \['other'\] in excess"):
            load_drafter(tmp_path, target, torch.float32, CPU)

    def test_a_tensor_of_another_shape(self, target: Path, tmp_path: Path) -> None:
        drafting_modules.save(target, tmp_path, "heads")
        tensors = load_file(tmp_path / WEIGHTS)
        save_file(tensors | {"weights": torch.zeros(2, 2)}, tmp_path / WEIGHTS)

        with pytest.raises(ModelLoadError, match=r"weights must be \[144, 48\], not torch.float32 \[2, 2\]"):
            load_drafter(tmp_path, target, torch.float32, CPU)

    def test_a_target_without_a_plain_rms_norm(self, target: Path, tmp_path: Path) -> None:
        drafting_modules.save(target, tmp_path / "draft", "heads")
        other = tiny.save(tmp_path / "other", tiny.gpt2(n_embd=48))

        with pytest.raises(ModelLoadError, match="model type 'gpt2' ends with a norm other than a plain RMS norm"):
            load_drafter(tmp_path / "draft", other, torch.float32, CPU)


def test_cards_of_version_1_describe_a_model_of_its_own_layers(target: Path, tmp_path: Path) -> None:
    distilled_draft.save(target, tmp_path)
    distilled_draft.as_earlier_version(tmp_path)
    card = json.loads((tmp_path / EARLIER_CARD).read_text())
    old = {name: card[name] for name in ("target", "target_vocabulary_size", "hidden_size", "layers")}
    (tmp_path / EARLIER_CARD).write_text(json.dumps(old | {"format_version": 1, "vocabulary_size": None}))

    assert read_card(tmp_path).kind == "layers"
    assert read_card(tmp_path).layers == (0, 1)


@pytest.mark.parametrize("kind", ["layers", "heads", "block", "eagle", "exit", "table"])
def test_a_draft_of_an_earlier_version_is_read_as_one_of_today(kind: str, target: Path, tmp_path: Path) -> None:
    if kind == "layers":
        distilled_draft.save(target, tmp_path)
    else:
        drafting_modules.save(target, tmp_path, kind, () if kind in ("exit", "table") else (1, 2))
    card, weights = read_draft(tmp_path), read_weights(tmp_path, read_draft(tmp_path))

    distilled_draft.as_earlier_version(tmp_path)

    assert read_draft(tmp_path) == card and card.kind == kind
    assert read_weights(tmp_path, card).tensors.keys() == weights.tensors.keys()


def test_one_file_describes_a_draft(target: Path, tmp_path: Path) -> None:
    drafting_modules.save(target, tmp_path, "heads")
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", WEIGHTS}
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "pilotfish_draft"


def test_a_card_in_the_configuration_counts_beside_one_of_an_earlier_version(target: Path, tmp_path: Path) -> None:
    drafting_modules.save(target, tmp_path, "heads")
    (tmp_path / EARLIER_CARD).write_text("{}")
    assert read_card(tmp_path).kind == "heads"
