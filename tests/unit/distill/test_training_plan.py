"""`pilotfish distill --plan` prints what a training takes, from the configuration of a target alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MixtralConfig, Qwen2VLConfig, T5Config

from cluster.core.errors import ConfigurationError, ModelLoadError
from deploy.distillation import dspark, eagle3
from deploy.distillation.training_plan import description, plan_block, plans_of, print_plan
from workers.distill.dspark.memory import BlockBatch, block_flops, block_memory, block_size, text_bytes
from workers.distill.dspark.module import SparkModule
from workers.distill.eagle3.memory import head_size
from workers.distill.memory import TargetSize
from workers.distill.modules import module_plan
from workers.distill.options import DistillOptions
from workers.distill.seq2seq_data import is_encoder_decoder
from workers.distill.student_pipeline import check_options
from workers.model.draft_card import DraftDescription
from workers.model.formats.registry import DraftWeights
from workers.model.formats.speculators import write_dspark, write_eagle3
from workers.model.public_shapes import FeatureShape, MaskedBlockShape

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=6, num_attention_heads=6,
    num_key_value_heads=3, max_position_embeddings=256,
)  # fmt: skip
TARGET, BATCH = TargetSize(100_000, 48, 96), BlockBatch(4, 64, 8)


def shape(kind: str = "rnn") -> MaskedBlockShape:
    """The drafter that the command trains by default."""
    chosen = dspark.options(["--target", "tiny", "--prompts", "none", "--out", "none", "--markov", kind])
    return dspark.block_shape(CONFIG, chosen, 3)


def begun(own: MaskedBlockShape | FeatureShape, rows: int, directory: Path) -> dict[str, Any]:
    """The options of a plan for a training that goes on with a draft of zeros of this shape."""
    directory.mkdir()
    kind = "block" if isinstance(own, MaskedBlockShape) else "eagle"
    card = DraftDescription("tiny", 96, 48, (), rows, kind=kind, taps=tuple(range(own.taps)), shape=own)
    tensors = {name: torch.zeros(sizes) for name, sizes in own.tensors().items()}
    weights = DraftWeights(tensors, torch.arange(rows), head=torch.zeros(rows, 48))
    if isinstance(own, MaskedBlockShape):
        write_dspark(directory, card, weights, architectures=())
    else:
        write_eagle3(directory, card, weights, architectures=(), speculative_tokens=5)
    return {"kind": "dspark" if kind == "block" else "eagle3", "start": directory}


def test_a_draft_that_is_trained_further_is_planned_with_its_own_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    CONFIG.save_pretrained(tmp_path / "target")
    first = shape()
    assert first.markov is not None
    block = replace(first, slots=16, markov=replace(first.markov, rows=32))
    head = replace(eagle3.shape_of(CONFIG, (0, 1), is_normed=False), keeps_normed_residual=False)

    def planned(own: MaskedBlockShape | FeatureShape, rows: int) -> dict[str, Any]:
        given = begun(own, rows, tmp_path / type(own).__name__)
        monkeypatch.setattr(module_plan, "layer_shape", None)  # calling it would be an error
        print_plan(DistillOptions(plan=True, json=True, max_length=64, **given), tmp_path / "target")
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    found = planned(block, 32)
    assert found["module_parameters"] == block_size(block).parameters
    assert found["batch"] == {"rows": 4096 // (8 * 16), "length": 64, "blocks": 8}
    found = planned(head, 40)
    assert found["module_parameters"] == head_size(head, 40).parameters and found["batch"]["vocabulary"] == 40


def test_packed_rows_are_planned_with_a_mask_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CONFIG.save_pretrained(tmp_path)

    def planned(pack: bool) -> dict[str, Any]:
        print_plan(DistillOptions(plan=True, json=True, kind="eagle3", max_length=64, pack=pack), tmp_path)
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    padded, packed = planned(pack=False), planned(pack=True)

    assert packed["batch"] == padded["batch"] | {"packs": True}
    assert packed["plans"][0]["peak"] > padded["plans"][0]["peak"]
    print_plan(DistillOptions(plan=True, kind="eagle3", max_length=64, pack=True), tmp_path)
    assert "64 packed rows of 64 tokens" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("kind", ["dspark", "layers", "heads"])
def test_rows_of_other_kinds_are_not_packed_by_name(kind: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--pack: refused for kind {kind}; it is for eagle3"):
        DistillOptions(plan=True, kind=kind, pack=True)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_parameters_are_counted_as_the_module_has_them(kind: str) -> None:
    module = SparkModule(shape(kind), torch.zeros(96, 48), torch.ones(3 * 48))

    assert block_size(shape(kind)).parameters == sum(one.numel() for one in module.parameters())


def test_ranks_share_parameters_and_states_and_recomputing_saves_activations() -> None:
    alone, eighth = (block_memory(TARGET, shape(), BATCH, 1000, ranks=ranks) for ranks in (1, 8))
    again = block_memory(TARGET, shape(), BATCH, 1000, recomputes=True)

    assert eighth.weights * 8 >= alone.weights > eighth.weights
    assert eighth.optimizer * 8 >= alone.optimizer > eighth.optimizer
    assert eighth.texts == alone.texts == 1000 * text_bytes(3, 48)
    assert alone.between == eighth.between == TARGET.whole
    assert again.forward < alone.forward and again.held == alone.held


def test_the_loss_is_planned_for_the_tokens_that_a_drafter_can_propose() -> None:
    target = replace(TARGET, vocabulary=96_000)
    markov = shape().markov
    assert markov is not None
    whole, some = (replace(shape(), markov=replace(markov, vocabulary=96_000, rows=rows)) for rows in (96_000, 8_000))

    found, reduced = (block_memory(target, one, BATCH, 1000) for one in (whole, some))

    logits = 6 * BATCH.rows * BATCH.blocks * whole.slots  # bytes of each token's, in bfloat16 and float32
    assert found.forward - reduced.forward >= logits * 88_000
    assert reduced.target - found.target == 2 * 48 * 8_000
    flops = [block_flops(target, one, BATCH) for one in (whole, some)]
    assert flops[0] > 5 * flops[1]


def test_a_plan_says_what_fits() -> None:
    training = plan_block(TARGET, shape(), BATCH)
    roomy, tight = (plans_of(training, 1000, device_bytes) for device_bytes in (1e9, 1e6))

    assert [(one.ranks, one.recomputes) for one in roomy] == [
        (n, again) for n in (1, 2, 4, 8) for again in (False, True)
    ]
    assert all(one.fits for one in roomy) and not any(one.fits for one in tight)
    most = roomy[0].most_text_tokens
    assert most is not None
    full = block_memory(TARGET, shape(), BATCH, most)
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


def test_a_device_fits_a_step_whatever_the_layers_of_the_target() -> None:
    """Only where texts or their hidden states are not stored yet, the whole target has to fit."""
    large = TargetSize(1_000_000_000, 48, 96)

    small, half, all_of_it = (plans_of(plan_block(large, shape(), BATCH), 1000, size) for size in (1e6, 1e9, 4e9))

    assert not any(one.fits for one in small)
    assert all(one.fits and not one.fits_target for one in half)
    assert all(one.fits_target for one in all_of_it)


def test_ranks_that_write_texts_have_a_part_of_the_target_each_before_a_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device that does not fit a target of 70 billion parameters fits an eighth of it."""
    alone = TargetSize(70_000_000_000, 48, 96)
    whole, eighths = (plan_block(size, shape(), BATCH) for size in (alone, replace(alone, ranks=8)))

    plans, divided = (plans_of(training, 1000, 80e9) for training in (whole, eighths))

    assert {one.memory.between for one in divided} == {2 * 70_000_000_000 // 8}
    assert all(one.fits_target for one in divided) and not any(one.fits_target for one in plans)
    assert [one.memory.peak for one in divided] == [one.memory.peak for one in plans]
    assert [one.most_text_tokens for one in divided] == [one.most_text_tokens for one in plans]
    CONFIG.save_pretrained(tmp_path)
    print_plan(DistillOptions(kind="eagle3", plan=True, json=True), tmp_path, 8)
    assert json.loads(capsys.readouterr().out)["target"]["ranks"] == 8
    print_plan(DistillOptions(kind="eagle3", plan=True), tmp_path, 8)
    assert "8 ranks write texts and compute" in capsys.readouterr().out


def test_a_rank_has_the_weights_as_the_engine_stores_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In int8, embedding and head stay in bfloat16. A step does not depend on it."""
    CONFIG.save_pretrained(tmp_path)
    plans = {}
    for quantization in ("none", "int8"):
        print_plan(DistillOptions(kind="eagle3", plan=True, json=True), tmp_path, 1, quantization)
        found = json.loads(capsys.readouterr().out)
        target = TargetSize(**found["target"])
        plans[quantization] = found["plans"][0]

    others = target.parameters - 2 * 96 * 48
    assert plans["int8"]["memory"]["between"] == plans["none"]["memory"]["between"] - others == target.ends + others
    assert plans["int8"]["peak"] == plans["none"]["peak"]


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("eagle3", "An EAGLE-3 head"),
        ("eagle", "An EAGLE head"),
        ("heads", "Heads"),
        ("block", "A block drafter"),
        ("exit", "The norm of an early exit"),
        ("layers", "A small model"),
    ],
)
def test_all_kinds_are_planned_for_the_devices_that_they_can_use(
    kind: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CONFIG.save_pretrained(tmp_path)
    layers = (0, 5) if kind == "layers" else ()
    options = DistillOptions(kind=kind, plan=True, json=True, max_length=64, layers=layers)

    print_plan(options, tmp_path)

    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [one["ranks"] for one in plans] == ([1, 1, 2, 2, 4, 4, 8, 8] if kind == "eagle3" else [1])
    assert all(one["most"] >= one["peak"] > one["held"] > 0 for one in plans)
    assert all((one["most_text_tokens"] is None) == (kind != "eagle3") for one in plans)
    print_plan(replace(options, json=False), tmp_path)
    table = capsys.readouterr().out
    assert named in table and ("One process trains it" in table) == (kind != "eagle3")


def test_a_number_of_workers_and_recomputing_choose_what_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CONFIG.save_pretrained(tmp_path)

    print_plan(DistillOptions(kind="eagle3", plan=True, json=True, workers=3, recompute=True), tmp_path)

    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [(one["ranks"], one["recomputes"]) for one in plans] == [(3, True)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "eagle", "depths": 3}, "--depths: refused for kind eagle; it is for heads, block, table"),
        ({"kind": "exit", "taps": (1,)}, "--taps: refused for kind exit; it is for heads, block, eagle"),
        ({"kind": "heads", "layers": (0,)}, "--layers: refused for kind heads; it is for layers, block, eagle, exit"),
        ({"kind": "block", "mix_rank": 8}, "--mix-rank: refused for kind block; it is for heads"),
        ({"kind": "layers", "layers": (0,), "depths": 3}, "--depths: refused for kind layers; it is for heads, block"),
        ({"kind": "layers", "layers": (0,), "int8": True}, "--int8: refused for kind layers; it is for heads, block"),
    ],
)
def test_an_option_that_the_kind_does_not_read_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Else a command would train, for hours perhaps, something other than what it was asked for."""
    CONFIG.save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        print_plan(DistillOptions(plan=True, **given), tmp_path)


def test_options_that_no_draft_model_reads_are_refused_before_anything_is_done() -> None:
    with pytest.raises(ConfigurationError, match="--optimizer: refused for kind layers; it is for heads, block, eagle"):
        check_options(DistillOptions(prompts=(Path(__file__),), out=Path("out"), steps=1, optimizer="adamw"))


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--plan: refused for kind table"):
        DistillOptions(kind="table", plan=True)
    CONFIG.save_pretrained(tmp_path / "llama")
    for layers in ((1, 2), (0, 5)):
        with pytest.raises(ConfigurationError, match="--plan: refused for kind exit with these layers"):
            print_plan(DistillOptions(kind="exit", plan=True, layers=layers), tmp_path / "llama")
    with pytest.raises(ConfigurationError, match="layers: needed at least one"):
        print_plan(DistillOptions(plan=True), tmp_path / "llama")
    mixture = MixtralConfig(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, num_local_experts=4,
    )  # fmt: skip
    mixture.save_pretrained(tmp_path / "mixture")
    with pytest.raises(ConfigurationError, match="model type 'mixtral': its layers are unlike Llama's"):
        print_plan(DistillOptions(plan=True, layers=(0,)), tmp_path / "mixture")
    with pytest.raises(ConfigurationError, match=r"--on-policy: 0\.5 is refused with --plan, which counts 0\.0"):
        DistillOptions(plan=True, layers=(0,), on_policy=0.5)
    for kind in ("block", "eagle", "exit", "heads", "layers"):
        with pytest.raises(ConfigurationError, match=f"--workers: 8 is refused for kind {kind}; several need eagle3"):
            DistillOptions(kind=kind, plan=True, workers=8)
        with pytest.raises(ConfigurationError, match=f"--recompute: refused for kind {kind}"):
            DistillOptions(kind=kind, plan=True, recompute=True)
    with pytest.raises(ConfigurationError, match="--precision: float32 is refused with --plan, which counts bfloat16"):
        DistillOptions(kind="eagle", plan=True, precision="float32")
    with pytest.raises(ConfigurationError, match="--optimizer: adamw is refused with --plan, which counts muon"):
        DistillOptions(kind="heads", plan=True, optimizer="adamw")
    with pytest.raises(ConfigurationError, match="--json: refused without --plan"):
        DistillOptions(prompts=(Path(__file__),), out=tmp_path, steps=1, json=True)
    with pytest.raises(ConfigurationError, match="--out: needed a directory"):
        DistillOptions(prompts=(Path(__file__),), steps=1)
    with pytest.raises(ConfigurationError, match="needed a directory with a config"):
        print_plan(DistillOptions(kind="dspark", plan=True), tmp_path)
    T5Config(vocab_size=96, d_model=48).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="--plan is for decoder-only targets"):
        print_plan(DistillOptions(kind="heads", plan=True), tmp_path)
    assert description(plan_block(TARGET, shape(), BATCH), [])["plans"] == []
    with pytest.raises(ValueError, match="Markov head"):
        block_size(replace(shape(), markov=None))


@pytest.mark.parametrize(
    "config",
    [
        pytest.param("{", id="no JSON"),
        pytest.param('{"model_type": "unheard"}', id="unknown type"),
        pytest.param('{"model_type": "llama", "hidden_size": "wide"}', id="a wrong type"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    refused = f"model directory '{tmp_path}': its configuration cannot be read"
    with pytest.raises(ModelLoadError, match=refused):
        print_plan(DistillOptions(kind="heads", plan=True), tmp_path)
    with pytest.raises(ModelLoadError, match=refused):
        is_encoder_decoder(tmp_path)


@pytest.mark.parametrize("kind", ["eagle3", "dspark", "eagle", "block"])
def test_layers_unlike_those_of_llama_are_refused_for_drafts_with_layers_like_them(kind: str, tmp_path: Path) -> None:
    GPT2Config(vocab_size=96, n_embd=48, n_layer=6, n_head=6).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="model type 'gpt2': its layers are unlike Llama's"):
        print_plan(DistillOptions(kind=kind, plan=True), tmp_path)


def test_a_target_that_reads_images_is_refused(tmp_path: Path) -> None:
    Qwen2VLConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="--plan: refused for model type 'qwen2_vl'"):
        print_plan(DistillOptions(kind="heads", plan=True), tmp_path)
