"""Steps of capacity simulations take what counted steps are predicted to take; a model with small layers stands in."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, get_args, get_type_hints

import pytest
from transformers import LlamaConfig, PreTrainedConfig
from typer.testing import CliRunner

from cluster.core.errors import ConfigurationError
from deploy.simulation.capacity.options import CapacityOptions
from deploy.simulation.commands import simulate
from deploy.simulation.device import models, predicted_steps
from deploy.simulation.device.models import MODELS, RankModel, rank_model
from deploy.simulation.device.predicted_steps import PredictedSteps, counted_layers
from deploy.simulation.device.prediction import predict
from deploy.simulation.device.speeds import DEVICES, H100, H200
from deploy.simulation.device.step import Rows, StepCount, count_step

LAYERS = 7
SMALL = LlamaConfig(
    vocab_size=2048, hidden_size=512, num_hidden_layers=LAYERS, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, intermediate_size=1024, max_position_embeddings=8192, tie_word_embeddings=False,
)  # fmt: skip
TARGET, DRAFT = "Llama-3.1-8B", "Llama-3.2-1B"


@cache
def _counted_once(model: RankModel, rows: tuple[Rows, ...]) -> StepCount:
    """A step of the first layers of a model, which are the same in all tests."""
    return count_step(model, rows)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = copy.deepcopy(SMALL)
    draft.num_hidden_layers = 2
    monkeypatch.setitem(MODELS, TARGET, SMALL)
    monkeypatch.setitem(MODELS, DRAFT, draft)
    monkeypatch.setattr(predicted_steps, "TOKENS", (1, 64, 1024))
    monkeypatch.setattr(predicted_steps, "count_step", _counted_once)


def counted(model: RankModel, *rows: Rows) -> float:
    return predict(count_step(model, rows)).seconds


def test_counted_steps_take_what_they_are_predicted_to_take_with_all_layers() -> None:
    found, model = PredictedSteps(RankModel(TARGET)), RankModel(TARGET)
    assert found.seconds([(512, 1)]) == pytest.approx(counted(model, Rows(1, 512)), rel=1e-9)
    assert found.seconds([(512, 1)] * 64) == pytest.approx(counted(model, Rows(64, 512)), rel=1e-9)
    mixed = counted(model, Rows(32, 512), Rows(1, 0, fresh=992))
    assert found.seconds([*[(512, 1)] * 32, (0, 992)]) == pytest.approx(mixed, rel=1e-9)


@pytest.mark.parametrize(("rows", "expected"), [
    ([(4096, 1)] * 64, (Rows(64, 4096),)),
    ([(100, 1)] * 16 + [(3000, 1)] * 16, (Rows(16, 100), Rows(16, 3000))),
    ([*[(512, 1)] * 32, (4096, 480)], (Rows(32, 512), Rows(1, 4096, fresh=480))),
])  # fmt: skip
def test_other_steps_differ_little_from_what_counting_them_predicts(
    rows: list[tuple[int, int]], expected: tuple[Rows, ...]
) -> None:
    """Attention follows from the rows; all else is interpolated."""
    found = PredictedSteps(RankModel(TARGET)).seconds(rows)
    assert found == pytest.approx(counted(RankModel(TARGET), *expected), rel=0.1)


def test_ranks_take_the_time_of_their_sums() -> None:
    model = RankModel(TARGET, ranks=4)
    found = {reduced: PredictedSteps(model, symmetric_memory=reduced).seconds([(512, 1)]) for reduced in (False, True)}
    for reduced, seconds in found.items():
        expected = predict(count_step(model, (Rows(1, 512),)), symmetric_memory=reduced).seconds
        assert seconds == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("name", "layers"), [
    ("Llama-3.3-70B", (2, 3)), ("gpt-oss-20b", (2, 4)), ("DeepSeek-V3", (5, 6)), ("Qwen3-Next-80B-A3B", (4, 8)),
    (DRAFT, (2,)),
])  # fmt: skip
def test_as_few_layers_are_counted_as_show_all_kinds(name: str, layers: tuple[int, ...]) -> None:
    assert counted_layers(RankModel(name)) == layers


def test_a_known_model_and_its_first_layers_have_the_same_kinds_of_layers() -> None:
    for name, config in MODELS.items():
        model = RankModel(name, layers=counted_layers(RankModel(name))[0])
        kinds: Any = getattr(config, "layer_types", None)
        found: PreTrainedConfig = model.config()
        assert found.num_hidden_layers == model.layers
        if kinds:
            assert list(found.layer_types) == list(kinds[: model.layers])


def test_progress_is_reported_to_the_end() -> None:
    shares = list[float]()
    PredictedSteps(RankModel(TARGET), report=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


# --- the command line -------------------------------------------------------------------------------


@pytest.fixture
def arguments() -> list[str]:
    load = ["--in-flight", "4", "--lengths", "64:32:0", "--seconds", "0.2", "--network-delay", "0"]
    return ["capacity", "--targets", "1", "--drafters", "1", *load]


def run(arguments: list[str], *more: str) -> list[str]:
    """The words of what is printed."""
    result = CliRunner().invoke(simulate, [*arguments, *more])
    assert result.exception is None, result.output
    return result.output.split()


def rate(words: list[str], name: str) -> float:
    """Tokens per second of a row of the table."""
    place = next(index for index in range(len(words)) if words[index : index + 3] == ["|", name, "|"])
    return float(words[place + 5])


def test_the_simulation_predicts_by_model_draft_and_device(arguments: list[str]) -> None:
    found = {device: run(arguments, "--device", device) for device in DEVICES}
    for device, words in found.items():
        assert f"steps of {TARGET} predicted on {device}, drafts of {DRAFT}" in " ".join(words)
        assert rate(words, "plain") > 0
    assert rate(found["H200"], "plain") > rate(found["H100"], "plain"), "it reads faster"


@pytest.mark.slow
def test_a_head_of_the_target_drafts_on_its_gpu(arguments: list[str]) -> None:
    words = run(arguments, "--draft", "eagle", "--placement", "target", "--acceptance", "0.9", "--max-nodes", "3")
    assert "drafts of eagle" in " ".join(words)
    assert rate(words, "drafts") > 0


def test_more_layers_take_longer(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    deep = copy.deepcopy(SMALL)
    deep.num_hidden_layers = 4 * LAYERS
    before = rate(run(arguments, "--drafters", "0"), "plain")
    monkeypatch.setitem(MODELS, TARGET, deep)
    assert rate(run(arguments, "--drafters", "0"), "plain") < 0.5 * before


@pytest.mark.parametrize(("wrong", "said"), [
    (("--model", "GPT-5"), "--model GPT-5: unknown; it must be one of"),
    (("--draft", "GPT-5"), "--draft GPT-5: unknown; it must be eagle, or"),
    (("--ranks", "3"), "--ranks 3: refused; it must divide the 4 KV heads"),
    (("--ranks", "2", "--model", "gpt-oss-20b"), "--ranks 2: refused; for gpt-oss-20b"),
    (("--draft", "eagle", "--model", "Qwen3-30B-A3B"), "--model Qwen3-30B-A3B: refused; with --draft eagle"),
])  # fmt: skip
def test_what_is_not_known_is_refused_by_option(arguments: list[str], wrong: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(simulate, [*arguments, *wrong])
    assert isinstance(result.exception, ConfigurationError)
    assert said in str(result.exception)


def test_the_devices_of_the_option_are_those_that_are_known() -> None:
    hints = get_type_hints(CapacityOptions)
    assert set(get_args(hints["device"])) == set(DEVICES)
    assert DEVICES["H200"].bytes_per_second > DEVICES["H100"].bytes_per_second
    assert tuple(DEVICES.values()) == (H100, H200)


def test_ranks_that_do_not_divide_a_model_are_refused_for_steps_as_for_simulations() -> None:
    with pytest.raises(ConfigurationError, match="--ranks 3"):
        rank_model(TARGET, 3)
    assert models.rank_model(TARGET, 4).ranks == 4
