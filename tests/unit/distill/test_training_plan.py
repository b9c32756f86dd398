"""`pilotfish distill --plan` prints what a training takes, from the configuration of a target alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from cluster.core.errors import ConfigurationError
from deploy.distillation import dspark
from deploy.distillation.training_plan import description, plan_block, print_plan
from workers.distill.dspark.module import SparkModule
from workers.distill.memory import BlockBatch, TargetSize, block_memory, block_size, text_bytes
from workers.distill.options import DistillOptions
from workers.model.public_shapes import MaskedBlockShape

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=6, num_attention_heads=6,
    num_key_value_heads=3, max_position_embeddings=256,
)  # fmt: skip
TARGET, BATCH = TargetSize(100_000, 48, 96), BlockBatch(4, 64, 8)


def shape(kind: str = "rnn") -> MaskedBlockShape:
    """The drafter that the command trains by default."""
    chosen = dspark.options(["--target", "tiny", "--prompts", "none", "--out", "none", "--markov", kind])
    return dspark.block_shape(CONFIG, chosen, 3)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_parameters_are_counted_as_the_module_has_them(kind: str) -> None:
    module = SparkModule(shape(kind), torch.zeros(96, 48), torch.ones(3 * 48))

    assert block_size(shape(kind)).parameters == sum(one.numel() for one in module.parameters())


def test_ranks_share_parameters_and_states_and_recomputing_saves_activations() -> None:
    alone, eighth = (block_memory(TARGET, shape(), BATCH, 1000, ranks=ranks) for ranks in (1, 8))
    again = block_memory(TARGET, shape(), BATCH, 1000, recomputes=True)

    assert eighth.weights * 8 >= alone.weights > eighth.weights
    assert eighth.optimizer * 8 >= alone.optimizer > eighth.optimizer
    assert eighth.target < alone.target and eighth.texts == alone.texts == 1000 * text_bytes(3, 48)
    assert again.forward < alone.forward and again.held == alone.held


def test_a_plan_says_what_fits() -> None:
    roomy = plan_block(TARGET, shape(), BATCH, 1000, 1e9)
    tight = plan_block(TARGET, shape(), BATCH, 1000, 1e6)

    assert [(one.ranks, one.recomputes) for one in roomy] == [
        (n, again) for n in (1, 2, 4, 8) for again in (False, True)
    ]
    assert all(one.fits for one in roomy) and not any(one.fits for one in tight)
    first = roomy[0]
    full = block_memory(TARGET, shape(), BATCH, first.most_text_tokens)
    assert full.peak <= 0.95e9 < full.peak + text_bytes(3, 48)
    rates = [one.tokens_per_second for one in roomy[2::2]]
    assert rates == sorted(rates)


def test_it_is_printed_for_a_directory_with_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CONFIG.save_pretrained(tmp_path)
    options = DistillOptions(kind="dspark", plan=True, json=True, max_length=64)

    print_plan(options, tmp_path)

    found = json.loads(capsys.readouterr().out)
    assert len(found["plans"]) == 8 and found["target"]["hidden_size"] == 48
    assert found["module_parameters"] > 0 and found["plans"][0]["peak"] > found["plans"][0]["held"]
    print_plan(replace(options, json=False), tmp_path)
    assert "GB of each device" in capsys.readouterr().out


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--plan: refused for kind layers"):
        DistillOptions(plan=True)
    with pytest.raises(ConfigurationError, match="--json: refused without --plan"):
        DistillOptions(prompts=(Path(__file__),), out=tmp_path, steps=1, json=True)
    with pytest.raises(ConfigurationError, match="--out: needed a directory"):
        DistillOptions(prompts=(Path(__file__),), steps=1)
    with pytest.raises(ConfigurationError, match="needed a directory with a config"):
        print_plan(DistillOptions(kind="dspark", plan=True), tmp_path)
    assert description(TARGET, shape(), BATCH, [])["plans"] == []
    with pytest.raises(ValueError, match="Markov head"):
        block_size(replace(shape(), markov=None))
