"""A training on stored hidden states reads of the target its ends, and the layers that a draft begins as."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from cluster.core.errors import ConfigurationError, ModelLoadError, TargetUnavailable
from deploy.distillation import dspark, eagle3, single_process
from deploy.distillation.conversations import Tokens, Write, WritingPlan
from deploy.distillation.execute import _configuration, execute
from deploy.distillation.rank_writer import RankWriter
from deploy.local import local_cluster
from tests.support.models import quantized
from tests.support.models.computed_states import computed_target
from tests.support.models.plain_generation import greedy_texts
from tests.unit.distill.conftest import Command
from tests.unit.distill.training_folder import LAYERS, LENGTH, PROMPT
from workers.distill.answers import Answer, AnswerFile, read_answers
from workers.distill.eagle3.states import TextStates
from workers.distill.job import ReadStates
from workers.distill.modules.tap_cache import TapCache, states_of, taps_of
from workers.distill.stored_target import StoredTarget, load_parts
from workers.distill.target_model import load_target
from workers.model.model_files import dequantize
from workers.model.stored.quantized_checkpoint import QuantizedCheckpoint
from workers.serve.configuration import load_configuration

CPU = torch.device("cpu")
TAPS = (1, 4)


def stored(target: PreTrainedModel, directory: Path, answers: Sequence[Answer], work: Path) -> StoredTarget:
    """The target with the stored states of some answers."""
    cache = TapCache(work, (*TAPS, LAYERS), target.config.hidden_size, 64)
    cache.fill(partial(taps_of, target), answers, lambda *_: None)
    return StoredTarget(load_parts(directory, CPU, torch.float32, (LAYERS - 1,)), cache)


def test_texts_have_the_states_that_were_stored(
    target: PreTrainedModel, directory: Path, answers: tuple[Answer, ...], tmp_path: Path
) -> None:
    some = [answers[0], replace(answers[1], answer=answers[1].answer[:4]), answers[2]]

    read, computed = (
        TextStates(one, some, max_length=64, batch_tokens=48).batch([1, 0, 2])
        for one in (stored(target, directory, some, tmp_path), computed_target(target, TAPS))
    )

    assert read.lengths.tolist() == [PROMPT + 4, PROMPT + LENGTH, PROMPT + LENGTH]
    torch.testing.assert_close(read.taps, computed.taps, rtol=2**-8, atol=1e-3)  # as bfloat16 rounds
    torch.testing.assert_close(read.final, computed.final, rtol=2e-2, atol=2e-2)


def test_a_text_without_states_is_named(
    target: PreTrainedModel, directory: Path, answers: tuple[Answer, ...], tmp_path: Path
) -> None:
    found = stored(target, directory, answers[:2], tmp_path)
    changed = replace(answers[1], prompt=answers[1].prompt[1:])

    with pytest.raises(ConfigurationError, match=r"--states: lacks the hidden states of the texts \['prompts:1'\]"):
        TextStates(found, [answers[0], changed], max_length=64, batch_tokens=48)


def test_other_layers_have_no_weights(target: PreTrainedModel, directory: Path, tmp_path: Path) -> None:
    parts = load_parts(directory, CPU, torch.float32, (LAYERS - 1,))

    own, whole = parts.get_decoder().layers, target.get_decoder().layers
    for name, value in whole[LAYERS - 1].named_parameters():
        assert torch.equal(own[LAYERS - 1].get_parameter(name), value)
    assert all(value.is_meta for layer in own[: LAYERS - 1] for value in layer.parameters())
    assert parts.get_output_embeddings().weight is parts.get_input_embeddings().weight  # as the target ties them
    found, wanted = (one.get_input_embeddings().get_parameter("weight") for one in (parts, target))
    assert torch.equal(found, wanted)

    weights = load_file(directory / "model.safetensors")
    del weights["model.norm.weight"]
    for file in directory.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"its safetensors lack \['model.norm.weight'\]"):
        load_parts(tmp_path, CPU, torch.float32, ())


QUANTIZED: dict[str, tuple[quantized.Quantize, dict[str, Any]]] = {
    "awq": (quantized.awq(16), quantized.AWQ | {"group_size": 16}),
    "awq of small groups": (quantized.awq(8), quantized.AWQ | {"group_size": 8}),
    "gptq": (quantized.gptq(4, 16), {"quant_method": "gptq", "bits": 4, "group_size": 16}),
    "nf4": (quantized.nf4(16), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}


@pytest.fixture(params=QUANTIZED)
def of_integers(request: pytest.FixtureRequest, directory: Path, tmp_path: Path) -> Path:
    """The target with matrices of 4 bits."""
    quantize, settings = QUANTIZED[request.param]
    return quantized.save_with_tokenizer(directory, tmp_path / request.param, quantize, settings)


def test_of_quantized_files_the_wanted_layers_alone_are_dequantized(
    of_integers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole copy of the target in plain numbers would take four times its bytes."""
    (tmp_path / "plain").mkdir()
    dequantize(of_integers, tmp_path / "plain")
    read, plain = list[str](), QuantizedCheckpoint.matrix

    def recorded(self: QuantizedCheckpoint, parameter: str, *values: Any) -> Any:
        read.append(parameter)
        return plain(self, parameter, *values)

    monkeypatch.setattr(QuantizedCheckpoint, "matrix", recorded)
    parts, wanted = (load_parts(one, CPU, torch.float32, (0, 3)) for one in (of_integers, tmp_path / "plain"))

    assert {name.split(".")[2] for name in read} == {"0", "3"} and len(set(read)) == len(read) == 2 * 7
    expected = {name: value for name, value in wanted.named_parameters() if not value.is_meta}
    found = {name: value for name, value in parts.named_parameters() if not value.is_meta}
    assert found.keys() == expected.keys() and any(".layers.3." in name for name in found)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("of_integers", "device", "is_copied"),
    [
        *(("awq", "cuda", False), ("nf4", "cuda", False)),
        *(("awq of small groups", "cpu", False), ("awq of small groups", "cuda", True)),
    ],
    indirect=["of_integers"],
)
def test_a_training_on_a_gpu_dequantizes_what_gpus_do_not_multiply_as_it_is_stored(
    of_integers: Path,
    answers: tuple[Answer, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    is_copied: bool,
) -> None:
    """The serving engine, which writes its texts, would refuse it there."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda _: None)
    (tmp_path / "temporary").mkdir()
    run = make_run(of_integers, answers, tmp_path, "eagle3", device=device)
    target = _configuration(run).target
    assert target.path == str(run.directory) and (run.directory != of_integers) is is_copied
    assert target.quantization == ("none" if is_copied else "stored")


@pytest.mark.slow
@pytest.mark.parametrize("of_integers", ["awq"], indirect=True)
def test_a_training_writes_no_copy_of_a_quantized_target(
    of_integers: Path, answers: tuple[Answer, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank keeps the integers, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    run = make_run(of_integers, answers, tmp_path, "eagle3")

    execute(lambda *_: run, run.options)

    assert run.directory == of_integers and (tmp_path / "out" / "model.safetensors").exists()
    assert not list((tmp_path / "temporary").rglob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_one_rank_of_the_engine_computes_the_states_and_no_layer_is_left_while_a_draft_is_trained(
    kind: str, directory: Path, target: PreTrainedModel, answers: tuple[Answer, ...], tmp_path: Path
) -> None:
    """Without a writer, the rank is in the same process. Its states are those of a model of `transformers`."""
    told: list[str] = []
    run = make_run(directory, answers, tmp_path, kind, told)

    execute(lambda *_: run, run.options)

    assert (tmp_path / "out" / "model.safetensors").exists()
    assert len(run.target.get_decoder().layers) == 0
    assert sum("the target starts on 1 rank, to compute hidden states" in line for line in told) == 1
    stored = TapCache(states_of(directory, tmp_path / "states"), run._stored.taps, 48, run.options.max_length)
    known = [one for one in answers if stored.has(one)]
    assert len(known) > len(answers) // 2  # some were lengthened
    for one in known:
        (states,) = taps_of(target, [(*one.prompt, *one.answer)], stored.taps)
        # The states have values up to 600.
        torch.testing.assert_close(stored.of(one).float(), states.float(), rtol=2**-7, atol=1e-2)


def test_nothing_of_the_engine_is_left_once_it_is_released(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and KV pool of the engine would take the memory of the training."""
    build, engines = local_cluster.build_engine, []

    def building(*given: Any, **named: Any) -> Any:
        engine = build(*given, **named)
        engines.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(local_cluster, "build_engine", building)
    named = {"target.path": str(directory), "target.device": "cpu", "target.kv.pool_bytes": 1 << 22}
    with RankWriter(load_configuration({}, named), lambda _: None, 64) as writer:
        read = writer.reading(TAPS)
        assert [len(one) for one in read([[3, 4, 5], [6]], TAPS, [])] == [3, 1]
        del read
        assert engines[0]() is not None
        writer.release()
        assert engines[0]() is None


class Writer:
    """Has the target for a process that trains. It is a `TextWriter` that is lost after so many batches of texts."""

    settings = ""

    def __init__(self, target: PreTrainedModel, batches: float = math.inf) -> None:
        self.calls: list[str] = []
        self._target, self._left = target, batches

    def writing(self) -> Write:
        self.calls.append("writing")

        def write(prompts: Sequence[Tokens], _: object, plan: WritingPlan) -> list[Tokens]:
            self._left -= 1
            if self._left < 0:
                raise TargetUnavailable("the ranks are lost")
            return greedy_texts(self._target, prompts, plan.most_tokens, plan.stops)

        return write

    def reading(self, taps: Sequence[int]) -> ReadStates:
        self.calls.append(f"reading {taps}")
        return partial(taps_of, self._target)

    def release(self) -> None:
        self.calls.append("release")


def run_with(writer: Writer, command: Command, *more: str) -> list[str]:
    """Train an EAGLE-3 head on the texts of a writer. Returns what was told."""
    work = command.work
    given: dict[str, object] = {"target": command.target, "prompts": command.directory / "questions.jsonl"}
    given |= {"out": work / "out", "answers": work / "answers.jsonl"}
    given |= {"max-length": 64, "max-tokens": 8, "max-prompt": 56}
    given |= {"write-seconds": 60, "steps": 1, "rows": 8, "temperatures": "0", "device": "cpu", "taps": "1,2"}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    words += ["--vocabulary-size", "48", "--batch-tokens", "128", *more]
    told: list[str] = []
    execute(eagle3.Run, eagle3.options(words), told.append, writer)
    return told


@pytest.mark.slow
def test_with_a_writer_no_process_that_trains_loads_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is kept when the writer is lost, and a run that finds all texts and states needs none."""
    command = Command(tmp_path, monkeypatch)
    writer, lost = (Writer(load_target(command.target, CPU), batches) for batches in (math.inf, 1))

    with pytest.raises(TargetUnavailable, match="the ranks are lost"):
        run_with(lost, command)
    assert len(read_answers(command.work / "answers.jsonl")) == 8

    run_with(writer, command)
    assert writer.calls[:3] == ["writing", "reading (1, 2, 3)", "release"]
    assert len(read_answers(command.work / "answers.jsonl")) == 20
    writer.calls.clear()
    told = run_with(writer, command, "--learning-rate", "0.002")  # another training
    assert set(writer.calls) == {"release"}
    assert any(line.endswith("0 of them new") for line in told)


def test_a_disk_without_room_for_the_states_is_refused_before_the_target_computes(
    directory: Path, answers: tuple[Answer, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(directory, answers, tmp_path, "eagle3")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    monkeypatch.setattr(TapCache, "fill", None)  # calling it would be another error
    refused = f"--states, or --work of pilotfish distill: {tmp_path / 'states'}/.* bytes, and its disk has 1 free"
    with pytest.raises(ConfigurationError, match=refused):
        execute(lambda *_: run, run.options)


@pytest.mark.parametrize(("kind", "token_bytes"), [("eagle3", 4 * (2 + 1) * 48 + 8), ("dspark", 4 * 3 * 48 + 409)])
def test_a_device_without_room_for_the_states_is_refused_before_they_are_read(
    directory: Path,
    answers: tuple[Answer, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    token_bytes: int,
) -> None:
    """What just fits is trained on, and one byte less is refused."""
    run = make_run(directory, answers, tmp_path, kind)
    run.options.long_share = 0.0  # no text gets others before it
    tokens = sum(len(answer.prompt) + len(answer.answer) for answer in answers)
    needed = tokens * token_bytes
    with monkeypatch.context() as patched:
        patched.setattr(single_process, "free_bytes", lambda _: needed - 1)
        patched.setattr(TapCache, "of", None)  # calling it would be another error
        refused = (
            rf"--most-tokens, or --answer-tokens of .*: {tokens:,} tokens of texts with their hidden states take "
            rf"{needed:,} bytes, and cpu has {needed - 1:,} free, for {tokens - 1:,} tokens"
        )
        with pytest.raises(ConfigurationError, match=refused):
            execute(lambda *_: run, run.options)
    again = make_run(directory, (), tmp_path, kind)
    again.options.long_share = 0.0
    monkeypatch.setattr(single_process, "free_bytes", lambda _: needed)
    execute(lambda *_: again, again.options)
    assert (tmp_path / "out").is_dir()


def make_run(
    directory: Path,
    answers: Sequence[Answer],
    work: Path,
    kind: str,
    told: list[str] | None = None,
    device: str = "cpu",
) -> Any:
    """A training of one step on texts that are there."""
    (work / "prompts.jsonl").write_text(json.dumps({"question": "What is one?"}) + "\n")
    with AnswerFile(work / "answers.jsonl") as file:
        for answer in answers:
            file.append(answer)
    words = ["--target", str(directory), "--prompts", str(work / "prompts.jsonl"), "--out", str(work / "out")]
    words += ["--answers", str(work / "answers.jsonl"), "--write-seconds", "0", "--steps", "1", "--device", device]
    words += ["--max-length", str(2 * (PROMPT + LENGTH)), "--max-tokens", str(LENGTH)]
    words += ["--precision", "float32"] if device == "cpu" else []  # what `transformers` computes on every CPU
    make, own = (eagle3, ["--vocabulary-size", "48"]) if kind == "eagle3" else (dspark, ["--blocks", "8"])
    return make.Run(make.options([*words, *own]), ([] if told is None else told).append)


def test_states_are_those_of_exactly_these_weights(directory: Path, tmp_path: Path) -> None:
    """A target that was trained on would have drafts learn from what it no longer computes."""
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    assert states_of(other, tmp_path) == states_of(directory, tmp_path)
    weights = load_file(other / "model.safetensors")
    name = next(name for name in weights if "layers.0." in name)
    save_file(weights | {name: weights[name] + 0.5}, other / "model.safetensors", {"format": "pt"})
    assert states_of(other, tmp_path) != states_of(directory, tmp_path)


def test_what_are_no_numbers_is_refused_by_the_name_of_the_option(
    directory: Path, answers: tuple[Answer, ...], tmp_path: Path
) -> None:
    run = make_run(directory, answers, tmp_path, "eagle3")
    run.options.taps, run.options.temperatures = "first", "warm"
    with pytest.raises(ConfigurationError, match="--taps: 'first' is refused; it must be numbers with commas"):
        run.taps()
    with pytest.raises(ConfigurationError, match="--temperatures: 'warm' is refused; it must be numbers with commas"):
        run.texts()


@pytest.mark.parametrize("layers", range(1, 40))
def test_drafts_of_targets_of_any_depth_read_hidden_states_that_these_have(layers: int) -> None:
    for make in (dspark, eagle3):
        taps = make.default_taps(layers)
        assert list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] < layers


def test_the_card_says_how_the_target_of_the_command_has_its_weights(
    directory: Path, answers: Sequence[Answer], tmp_path: Path
) -> None:
    """The texts and hidden states belong to these weights."""
    run = make_run(directory, answers, tmp_path, "eagle3")
    assert run.card.weights == ""
    run.options.quantization = "int8"

    assert eagle3.Run(run.options, print).card.weights == "rounded to int8"
