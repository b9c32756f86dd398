"""Rounds of Qwen3-8B with an EAGLE head on a fake device: the target verifies, and the method that serves drafts."""

from __future__ import annotations

import copy

import pytest
import torch
from typer.testing import CliRunner

from cluster.core.config.draft_section import DraftSection
from deploy.simulation.commands import simulate
from deploy.simulation.device import rounds
from deploy.simulation.device.drafting import RoundCount, count_eagle_round
from deploy.simulation.device.models import MODELS, RankModel
from deploy.simulation.device.rounds import predict_round
from workers.draft.eagle.eagle_pass import EaglePass
from workers.forward.graph_sizes import MOST_RANKED, drafting_graph_sizes

pytestmark = pytest.mark.slow

MODEL = RankModel("Qwen3-8B")
DRAFT = DraftSection()
TOKENS = 1 + DRAFT.max_nodes


@pytest.fixture(autouse=True)
def _few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy.deepcopy(MODELS[MODEL.name])
    config.num_hidden_layers = 6
    config.layer_types = config.layer_types[:6]
    monkeypatch.setitem(MODELS, MODEL.name, config)


def found(rows: int) -> RoundCount:
    return count_eagle_round(MODEL, rows, 2048, DRAFT)


def test_a_round_launches_as_much_for_any_number_of_rows() -> None:
    """Each depth is one graph. Beside it the host copies where its windows are, and reads its candidates."""
    rounds_ = one, eight, many = [found(rows) for rows in (1, 8, 64)]
    names = [
        [[kernel.name for kernel in kernels] for kernels in (*of.drafts.passes, of.drafts.beside)] for of in rounds_
    ]
    assert names[0] == names[1] == names[2]
    assert len(one.drafts.passes) == DRAFT.max_depth, "committed tokens, and all depths but the last"
    assert {of.drafts.copies for of in rounds_} == {1 + len(one.drafts.passes)}, (
        "taps, and where the windows of each pass are"
    )
    assert {of.drafts.waits for of in rounds_} == {DRAFT.max_depth}, "tokens and confidences together"
    assert {of.target.waits for of in rounds_} == {1}, "decisions and hidden states together"
    assert many.target.shown_bytes == 64 * TOKENS * 3 * 4096 * 2
    assert predict_round(one).seconds < predict_round(eight).seconds < predict_round(many).seconds


def test_the_heads_graphs_are_those_of_all_sizes() -> None:
    assert found(1).drafts.graphs == len(drafting_graph_sizes()) + len(drafting_graph_sizes((1, 2, 4), MOST_RANKED))


def test_a_wait_inside_a_pass_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = EaglePass._entered

    def waiting(self: EaglePass, features: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        following[0].item()
        return entered(self, features, following)

    monkeypatch.setattr(EaglePass, "_entered", waiting)
    with pytest.raises(Exception, match="_local_scalar_dense"):
        found(1)


def test_the_command_predicts_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ROUND_ROWS", (1,))
    result = CliRunner().invoke(simulate, ["step", "--model", MODEL.name, "--draft", "eagle"])
    assert "Qwen3-8B after 2048 tokens with an EAGLE head" in " ".join(result.output.split())
    assert "1 × 8" in result.output
    assert "leave out what the host does before and after these kernels" in " ".join(result.output.split())


@pytest.mark.parametrize("options", [("--ranks", "2"), ("--model", "gpt-oss-20b")])
def test_rounds_of_ranks_and_of_mixtures_are_refused(options: tuple[str, ...]) -> None:
    result = CliRunner().invoke(simulate, ["step", "--model", MODEL.name, "--draft", "eagle", *options])
    assert result.exit_code != 0
    assert options[0] in str(result.exception)
