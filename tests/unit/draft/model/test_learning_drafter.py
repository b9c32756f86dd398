"""A draft model that learns: other layers for the requests of one salt, and layers replaced while it drafts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.core.errors import ConfigurationError
from cluster.core.ids import CacheSalt, SequenceId
from tests.support.models import distilled_draft, tiny
from tests.unit.draft.rows import TOKENS, draft, row
from workers.draft.common.learning import LearnsOnline, Reservoir, salt_key
from workers.draft.model.learning_drafter import LearnedModels, LearningTreeDrafter
from workers.draft.model.model_expander import ModelExpander
from workers.draft.registry import create
from workers.model import devices
from workers.model.draft_card import VOCABULARY, WEIGHTS
from workers.serve.configuration import load_configuration

SALT = "a/"
KEY = salt_key(SALT)
CHAINS: dict[str, Any] = {"candidates": 1, "width": 1, "lookup": "off"}
Make = Callable[..., LearningTreeDrafter]


def made(target: Path, draft: Path, acceptance: str = "coupled", **settings: Any) -> LearningTreeDrafter:
    """A drafter that learns."""
    model = {"path": str(draft), "device": "cpu", "kv": {"pool_bytes": 1 << 20}} | CHAINS | settings
    values = {
        "target": {"path": str(target), "device": "cpu", "acceptance": acceptance},
        "draft": {"method": "model", "learn": "on", "max_nodes": 4, "max_depth": 4, "model": model},
    }
    configuration = load_configuration(values)
    found = create(configuration.draft, configuration.target)
    assert isinstance(found, LearnsOnline) and isinstance(found, LearningTreeDrafter)
    return found


@pytest.fixture(params=["auto", pytest.param("off", marks=pytest.mark.slow)], ids=["kernels", "modules"])
def make(request: pytest.FixtureRequest, target: Path) -> Make:
    """Makes a drafter with the target's own weights, and with others for the requests of one salt if it is told so."""

    def create(*, is_replaced: bool = False) -> LearningTreeDrafter:
        drafter = made(target, target, native=request.param)
        if is_replaced:
            drafter.weights.replace(KEY, others(drafter))
        return drafter

    return create


def others(drafter: LearningTreeDrafter) -> Mapping[str, torch.Tensor]:
    """Weights that draft otherwise than those of the files."""
    return {name: value.roll(1, 0) for name, value in drafter.weights.of("").items()}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The number of tokens of each row of each forward pass."""
    found: list[list[int]] = []
    expand = ModelExpander.expand

    def recorded(self: ModelExpander, rows: Any) -> Any:
        found.append([len(one.tokens) for one in rows])
        return expand(self, rows)

    monkeypatch.setattr(ModelExpander, "expand", recorded)
    return found


def test_a_running_sequence_is_drafted_for_as_if_the_new_weights_had_read_all_of_it(
    make: Make, passes: list[list[int]]
) -> None:
    """Nothing that was computed with the former weights is read."""
    drafter = make()
    draft(drafter, row(20, salt=SALT))
    drafter.weights.replace(KEY, others(drafter))
    passes.clear()
    swapped = draft(drafter, row(24, 20))
    assert passes[0] == [24]
    fresh = make(is_replaced=True)
    assert swapped == draft(fresh, row(24, salt=SALT))
    assert swapped.tree != draft(fresh, row(24, name="b", salt="b/")).tree
    drafter.weights.replace(KEY, None)
    assert draft(drafter, row(28, 24)).tree == draft(fresh, row(28, name="c", salt="b/")).tree


@pytest.mark.slow
def test_a_sequence_of_another_salt_keeps_what_was_computed_for_it(make: Make, passes: list[list[int]]) -> None:
    drafter = make()
    draft(drafter, row(20, salt="b/"))
    drafter.weights.replace(KEY, others(drafter))
    passes.clear()
    draft(drafter, row(21, 20))
    assert len(passes[0]) == 1 and passes[0][0] <= 2


@pytest.mark.slow
def test_rows_with_different_weights_are_drafted_in_one_call_as_each_is_alone(make: Make) -> None:
    rows = [row(40, name=name, salt=salt) for name, salt in (("1", SALT), ("2", "b/"), ("3", SALT))]
    drafter, alone = make(is_replaced=True), make(is_replaced=True)
    together = drafter.propose(rows)
    assert list(together) == [alone.propose([one])[0] for one in rows]
    assert together[0].tree == together[2].tree != together[1].tree
    assert together[1] == make().propose([rows[1]])[0]
    pool = drafter._models.own.memory
    assert pool.blocks_free < pool.blocks_total
    drafter.release([one.sequence_id for one in rows])
    assert pool.blocks_free == pool.blocks_total


def test_all_models_share_the_embedding_and_one_takes_no_more_memory_than_is_stated(target: Path) -> None:
    drafter = made(target, target)
    weights = drafter.weights
    assert isinstance(weights, LearnedModels)
    weights.replace(KEY, others(drafter))
    models = [one._model for one in (weights.own, weights.of_salt(SALT))]
    natives = [model.native for model in models]
    if natives[0] is None:  # no compiler here
        tables = [model.module.get_input_embeddings().weight for model in models]
    else:
        tables = [native._embedding for native in natives]  # type: ignore[union-attr]
    assert tables[0] is tables[1] is not None
    layers = sum(value.numel() for value in weights.of(KEY).values())
    head = tiny.VOCABULARY * 48
    assert weights.bytes_each == layers * (2 + 4) + head * 4


@pytest.mark.parametrize("native", ["auto", pytest.param("off", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["plain", "distilled"])
def test_the_files_of_a_draft_may_become_shorter_while_it_drafts(
    target: Path, tmp_path: Path, kind: str, native: str
) -> None:
    """A process ends that reads what was mapped of such a file (SIGBUS)."""
    path = tmp_path / "draft"
    if kind == "distilled":
        distilled_draft.save(target, path, (1,), range(0, 96, 2))
    else:
        shutil.copytree(target, path)
    drafter = made(target, path, native=native)
    expected = made(target, path, native=native)
    weights, version = {name: value.clone() for name, value in others(expected).items()}, tmp_path / "version"
    expected.weights.replace(KEY, weights)
    maps = Path("/proc/self/maps").read_text()
    assert str(path / WEIGHTS) not in maps
    os.truncate(path / WEIGHTS, 64)
    assert draft(drafter, row(20, salt="b/")) == draft(expected, row(20, salt="b/"))
    drafter.weights.replace(KEY, weights)
    assert draft(drafter, row(20, name="c", salt=SALT)) == draft(expected, row(20, name="c", salt=SALT))
    assert all(torch.equal(value, weights[name].roll(-1, 0)) for name, value in drafter.weights.of("").items())
    version.mkdir()
    with pytest.raises(ValueError, match="safetensors"):
        drafter.weights.save(version, weights)


def test_texts_of_answers_are_collected_where_their_requests_allow_it(target: Path) -> None:
    drafter, reservoir = made(target, target), Reservoir(1 << 20)
    drafter.collect_into(reservoir)

    def ended(name: str, length: int, *, allows: bool) -> None:
        first = row(length, name=name, salt=SALT)
        assert first.start is not None
        start = replace(first.start, cache_salt=CacheSalt(SALT), allows_learning=allows)
        drafter.propose([replace(first, start=start)])
        drafter.release([SequenceId(name)])

    ended("allowed", 20, allows=True)
    ended("forbidden", 20, allows=False)
    ended("without an answer to draft for", 5, allows=True)  # a prompt of 4 tokens, and the first one after it
    assert reservoir.seen == 1
    ((texts,),) = ([*one.training, *one.left_out, *one.held_back] for one in reservoir.salts())
    assert (texts.tokens, texts.base_len, texts.hidden.numel()) == (tuple(TOKENS[:20]), 5, 0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "in several files", "tied", "distilled", "int8"])
def test_a_stored_version_is_the_draft_with_other_layers(target: Path, tmp_path: Path, kind: str) -> None:
    """Layers in 8 bits are trained as plain numbers, and quantized again."""
    path, version = tmp_path / "draft", tmp_path / "version"
    settings = {"quantization": "int8"} if kind == "int8" else {}
    if kind == "distilled":
        distilled_draft.save(target, path, (1,), range(0, 96, 2))
    else:
        config = tiny.qwen2() if kind == "tied" else tiny.llama()
        tiny.save(path, config, seed=5)
    if kind == "in several files":
        tensors = load_file(path / WEIGHTS)
        (path / WEIGHTS).unlink()
        names = sorted(tensors)
        parts = {"model-1-of-2.safetensors": names[::2], "model-2-of-2.safetensors": names[1::2]}
        for file, part in parts.items():
            save_file({name: tensors[name] for name in part}, path / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    drafter = made(target, path, **settings)
    weights = {name: value.bfloat16().float() for name, value in others(drafter).items()}
    version.mkdir()
    drafter.weights.save(version, weights)
    found = drafter.weights.read(version)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    drafter.weights.replace(KEY, found)
    learned = draft(drafter, row(24, salt=SALT))
    assert learned == draft(made(target, version, **settings), row(24, salt=SALT))
    assert learned.tree != draft(drafter, row(24, name="b", salt="b/")).tree
    ends = {VOCABULARY} if kind == "distilled" else {"model.embed_tokens.weight"}
    ends |= set() if kind in ("distilled", "tied") else {"lm_head.weight"}
    tensors = load_file(version / WEIGHTS)
    assert tensors.keys() - weights.keys() == ends
    written = sum(file.stat().st_size for file in version.iterdir())
    assert written <= drafter.weights.saved_bytes <= written + 256 * (len(tensors) + 1)


def test_a_version_of_another_draft_is_refused(target: Path, tmp_path: Path) -> None:
    path, version = tmp_path / "draft", tmp_path / "version"
    distilled_draft.save(target, path, (1,), range(0, 96, 2))
    drafter = made(target, path)
    weights = drafter.weights.of("")

    def stored() -> Path:
        shutil.rmtree(version, ignore_errors=True)
        version.mkdir()
        drafter.weights.save(version, weights)
        return version

    distilled_draft.as_earlier_version(stored())  # a version that was written before the draft's description moved
    drafter.weights.read(version)
    distilled_draft.change_card(stored(), {"target": "another"})
    with pytest.raises(ValueError, match="another target, other sizes or another vocabulary"):
        drafter.weights.read(version)
    tensors = load_file(stored() / WEIGHTS)
    tensors[VOCABULARY] = tensors[VOCABULARY] + 1
    save_file(tensors, version / WEIGHTS)
    with pytest.raises(ValueError, match="another target, other sizes or another vocabulary"):
        drafter.weights.read(version)
    del tensors["model.norm.weight"]
    tensors[VOCABULARY] = tensors[VOCABULARY] - 1
    save_file(tensors, version / WEIGHTS)
    with pytest.raises(ValueError, match="names and shapes"):
        drafter.weights.read(version)


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        ({"pard_token": 95}, {}, "PARD model; it must draft one token after another"),
        ({}, {"acceptance": "rejection"}, "draft.model.distributions: auto and target.acceptance: rejection"),
        ({}, {"distributions": "on"}, "draft.model.distributions: on and target.acceptance: coupled"),
        ({}, {"quantization": "stored"}, "draft.model.quantization: stored; it must be none, int8 or int4"),
    ],
    ids=["PARD", "a rule that draws", "drawn drafts", "stored bits"],
)
def test_draft_models_that_cannot_be_trained_are_refused_by_their_setting(
    target: Path, tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], reason: str
) -> None:
    path = shutil.copytree(target, tmp_path / "draft")
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | config))
    with pytest.raises(ConfigurationError, match=f"draft.learn: on is refused with .*{reason}"):
        made(target, path, **settings)


def test_a_translators_draft_is_refused(target: Path, tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "draft", tiny.marian())
    with pytest.raises(ConfigurationError, match="which has an encoder; it must be a decoder alone"):
        made(target, path)


def test_a_draft_on_a_gpu_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "choose_device", lambda *_: torch.device("cuda"))
    with pytest.raises(ConfigurationError, match="a draft model on a GPU"):
        made(target, target)


def test_a_mixture_whose_files_store_its_experts_one_by_one_is_refused(target: Path, tmp_path: Path) -> None:
    path = tiny.save(tmp_path / "draft", tiny.qwen3_moe())
    with pytest.raises(ConfigurationError, match="quantized or in another form; it must be a draft with plain weights"):
        made(target, path)
