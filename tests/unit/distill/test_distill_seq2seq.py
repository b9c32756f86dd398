"""Drafts of encoder-decoder targets: the data, the student, the stored draft and the command."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from cluster.core.errors import ConfigurationError
from deploy import cli
from tests.support.models import tiny
from tests.support.translation.tiny_marian import FRENCH, save_translator
from workers.distill.answers import Answer, read_answers
from workers.distill.loop import TrainingPlan
from workers.distill.modules.tap_cache import TapCache, taps_of
from workers.distill.seq2seq_data import decoder_start, greedy_answers
from workers.distill.seq2seq_student import Seq2SeqStudent, make_seq2seq_student
from workers.distill.student import StudentPlan, export
from workers.distill.target_model import load_seq2seq_target
from workers.distill.train import Training
from workers.forward.attention import register
from workers.model.distilled import load_distilled_draft
from workers.model.draft_card import read_card
from workers.model.drafting.files import load_drafter
from workers.model.drafting.table import SuccessorTable

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SOURCES = ((5, 9, 11, 2), (40, 41), (7, 8, 9, 10, 11, 12, 2))


DECODER_LAYERS = {
    "t5": "num_layers",
    "t5_gated": "num_decoder_layers",
    "marian": "decoder_layers",
    "bart": "decoder_layers",
}
"""The field of each family with the number of decoder layers."""


@pytest.fixture(scope="module", params=sorted(tiny.ENCODER_DECODER_FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny.ENCODER_DECODER_FAMILIES[request.param](**{DECODER_LAYERS[request.param]: 3})
    return tiny.save(tmp_path_factory.mktemp("target"), config)


@pytest.fixture(scope="module")
def target(directory: Path) -> Any:
    return load_seq2seq_target(directory, CPU)


def student_of(target: Any, *layers: int, vocabulary: tuple[int, ...] | None = None) -> Seq2SeqStudent:
    return make_seq2seq_student(target, StudentPlan(layers, vocabulary=vocabulary), decoder_start(target), seed=0)


def answers_of(target: Any, most: int = 8) -> list[Answer]:
    found = greedy_answers(target, SOURCES, most, decoder_start(target))
    return [
        Answer(str(number), "", 0.0, False, source, tokens, leading)
        for number, (source, (tokens, leading)) in enumerate(zip(SOURCES, found, strict=True))
    ]


def logits_of(student: Seq2SeqStudent, answers: list[Answer]) -> torch.Tensor:
    with torch.inference_mode():
        return student.logits(student.states(student.eval().batch(answers, 64)))


def target_logits(target: Any, answers: list[Answer], draft: Any = None) -> torch.Tensor:
    """Logits of the target, or of a draft of it, before each token of the answers, from one pass per answer."""
    start, model, found = decoder_start(target), draft or target, []
    for answer in answers:
        tokens = torch.tensor([[*start, *answer.answer[:-1]]])
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([answer.prompt]), decoder_input_ids=tokens, use_cache=False).logits
        found.append(logits[0, len(start) - 1 :])
    return torch.cat(found)


class TestData:
    def test_a_batch_has_the_answers_of_each_source_alone(self, target: Any) -> None:
        together = answers_of(target)
        for answer in together:
            ((alone, _),) = greedy_answers(target, [answer.prompt], 8, decoder_start(target))
            assert answer.answer == alone

    def test_the_most_probable_token_is_the_one_that_was_written(self, target: Any) -> None:
        answers = answers_of(target)
        expected = target_logits(target, answers).log_softmax(dim=-1)
        for answer in answers:
            assert answer.leading is not None
            assert answer.leading.tokens[:, 0].tolist() == list(answer.answer)
            assert len(answer.leading.tokens) == len(answer.answer) > 1
        found = torch.cat([torch.from_numpy(answer.leading.log_probabilities[:, 0]) for answer in answers])  # type: ignore[union-attr]
        torch.testing.assert_close(found.float(), expected.max(dim=-1).values, rtol=2e-2, atol=2e-2)


class TestHiddenStates:
    def test_taps_of_a_batch_are_those_of_each_answer_alone(self, target: Any) -> None:
        start = decoder_start(target)
        answers = [replace(answer, prompt=start, source=answer.prompt) for answer in answers_of(target)]
        rows = [(*answer.prompt, *answer.answer) for answer in answers]
        together = taps_of(target, rows, (0, 3), [answer.source for answer in answers])
        for answer, row, found in zip(answers, rows, together, strict=True):
            with torch.inference_mode():
                states = target(
                    input_ids=torch.tensor([answer.source]),
                    decoder_input_ids=torch.tensor([row]),
                    output_hidden_states=True,
                ).decoder_hidden_states
            expected = [states[0][0], states[-1][0]]  # the last one has passed a final norm, where there is one
            if target.config.model_type != "t5":
                torch.testing.assert_close(found.float(), torch.cat(expected, dim=1), rtol=2e-2, atol=2e-2)
            else:
                norm = target.get_decoder().final_layer_norm
                torch.testing.assert_close(found[:, :48].float(), expected[0], rtol=2e-2, atol=2e-2)
                torch.testing.assert_close(norm(found[:, 48:].float()), expected[1], rtol=2e-2, atol=2e-2)

    def test_states_of_another_source_are_computed_anew(self, target: Any, tmp_path: Path) -> None:
        start = decoder_start(target)
        answer = replace(answers_of(target)[0], prompt=start, source=SOURCES[0])
        cache = TapCache(tmp_path, (3,), 48, 64)
        cache.fill(partial(taps_of, target), [answer], lambda *_: None)
        assert cache.has(answer)
        assert not cache.has(replace(answer, source=SOURCES[1]))


class TestStudent:
    def test_with_all_layers_the_student_equals_the_target(self, target: Any) -> None:
        answers = answers_of(target)
        torch.testing.assert_close(
            logits_of(student_of(target, 0, 1, 2), answers), target_logits(target, answers), rtol=5e-3, atol=5e-3
        )

    def test_only_decoder_layers_are_its_own(self, target: Any) -> None:
        student = student_of(target, 2).train()
        assert all("decoder" in name and "embed_tokens" not in name for name in student.own_parameters())
        assert not student.module.get_encoder().training
        assert student.module.get_decoder().training

    def test_layers_that_do_not_exist_are_refused(self, target: Any) -> None:
        with pytest.raises(ConfigurationError, match="layers: 3 is refused; it must be within 0 and 2"):
            student_of(target, 3)
        with pytest.raises(ConfigurationError, match="layers: needed at least one"):
            student_of(target)

    def test_training_lowers_the_loss(self, target: Any, tmp_path: Path) -> None:
        answers = answers_of(target, 12)
        student = student_of(target, 1)
        plan = TrainingPlan(steps=60, learning_rate=5e-3, precision="float32", max_length=64)
        progress = Training(student, answers, answers, plan, tmp_path).run(lambda _, __: None)
        losses = [loss for _, _, loss in progress.losses]
        assert losses[-1] < 0.5 * losses[0]
        assert progress.agreements[-1][2] >= progress.agreements[0][2]


class TestStoredDraft:
    @pytest.mark.parametrize("vocabulary", [None, (0, 1, 2, 5, 40, 95)])
    def test_a_draft_is_loaded_with_the_targets_encoder(
        self, directory: Path, target: Any, tmp_path: Path, vocabulary: tuple[int, ...] | None
    ) -> None:
        student = student_of(target, 0, 2, vocabulary=vocabulary)
        with torch.no_grad():
            for parameter in student.own_parameters().values():
                parameter.copy_(parameter.mul(1.25).bfloat16())
        export(student, tmp_path / "draft", directory.name, "card", {})
        register()
        config = AutoConfig.from_pretrained(tmp_path / "draft")
        draft = load_distilled_draft(tmp_path / "draft", directory, config, torch.float32, CPU)
        draft.module.set_attn_implementation("sdpa")
        answers = answers_of(target)
        torch.testing.assert_close(
            logits_of(student, answers), target_logits(target, answers, draft.module.eval()), rtol=5e-3, atol=5e-3
        )
        assert read_card(tmp_path / "draft").layers == (0, 2)
        stored = load_file(tmp_path / "draft" / "model.safetensors")
        assert all("decoder" in name for name in stored if name != "vocabulary")

    def test_a_draft_is_trained_further(self, directory: Path, target: Any, tmp_path: Path) -> None:
        student = student_of(target, 1, vocabulary=(0, 1, 2, 5))
        export(student, tmp_path / "draft", directory.name, "card", {})
        plan = StudentPlan.of_draft(tmp_path / "draft")
        again = make_seq2seq_student(target, plan, decoder_start(target), 0)
        assert again.tokens_of(torch.arange(4)).tolist() == [0, 1, 2, 5]
        for name, value in student.own_parameters().items():
            assert torch.equal(value.detach().bfloat16(), again.own_parameters()[name].detach().bfloat16())


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["pilotfish", "distill", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A directory, and the arguments of a command that makes a draft of a tiny translator."""
    directory = tmp_path_factory.mktemp("command")
    save_translator(directory / "target", "marian", decoder_layers=3)
    words = " ".join(FRENCH).split()
    rows = [{"fr": " ".join(words[number % 20 :][:5])} for number in range(40)]
    (directory / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--set", f"target.path={directory / 'target'}", "--prompts", str(directory / "in.jsonl")]
    arguments += ["--field", "fr", "--layers", "2", "--vocabulary-size", "40", "--max-tokens", "8", "--held-out", "3"]
    arguments += ["--precision", "float32", "--device", "cpu", "--out", str(directory / "draft"), "--steps", "3"]
    return directory, arguments


def test_the_command_makes_a_draft(command: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    directory, arguments = command
    evaluation = ["--evaluate", str(directory / "test.jsonl"), "--evaluate-prompts", "5"]
    assert run(monkeypatch, *arguments, *evaluation) == 0
    answers = read_answers(directory / "draft.work" / "answers.jsonl")
    assert (len(answers), sum(answer.held_out for answer in answers)) == (40, 3)
    card = read_card(directory / "draft")
    assert (card.layers, card.vocabulary_size, card.kind) == ((2,), 40, "layers")
    text = (directory / "draft" / "README.md").read_text()
    for words in (
        "encoder, embedding and head",
        "decoder layer 2 of the target",
        "--field fr",
        "5 prompts of test.jsonl",
    ):
        assert words in text
    config = AutoConfig.from_pretrained(directory / "draft")
    assert (config.decoder_layers, config.encoder_layers) == (1, 2)
    before = (directory / "draft.work" / "answers.jsonl").read_bytes()
    assert run(monkeypatch, *arguments, *evaluation) == 0
    assert (directory / "draft.work" / "answers.jsonl").read_bytes() == before


@pytest.mark.parametrize("kind", ["heads", "table"])
def test_the_command_makes_modules(
    command: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch, kind: str, tmp_path: Path
) -> None:
    directory, arguments = command
    without = ("--layers", "2")
    arguments = [word for word in arguments if word not in without]
    more = ["--kind", kind, "--depths", "2", "--steps", "60", "--learning-rate", "0.01", "--max-length", "32"]
    more += ["--work", str(tmp_path / "work"), "--out", str(tmp_path / kind)]
    assert run(monkeypatch, *arguments, *more, "--evaluate", str(directory / "test.jsonl")) == 0
    drafter = load_drafter(tmp_path / kind, directory / "target", torch.float32, CPU, kind)
    text = (tmp_path / kind / "README.md").read_text()
    assert f"The kind is `{kind}`" in text and "--field fr" in text
    if kind == "table":
        assert isinstance(drafter.module, SuccessorTable)
        assert drafter.module.successors.shape == (96, 2)
        assert int((drafter.module.successors[:, 0] >= 0).sum()) > 0
        return
    assert (drafter.card.taps, drafter.card.vocabulary_size) == ((3,), 40)
    assert "| test.jsonl |" in text and "| held-out prompts |" in text
    answers = read_answers(tmp_path / "work" / "answers.jsonl")
    assert all(answer.prompt for answer in answers)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--kind", "eagle"), "--kind: 'eagle' is refused for an encoder-decoder target; it must be layers, heads or"),
        (("--kind", "heads", "--layers", "", "--taps", "4"), "--taps: [4] is refused; it must be within 0 and 3"),
        (("--on-policy", "0.5"), "--on-policy: refused for an encoder-decoder target"),
        (("--layers", "7"), "layers: 7 is refused; it must be within 0 and 2"),
        (("--field", "de"), "a text under 'de'"),
    ],
)
def test_what_does_not_fit_the_target_is_refused(
    command: tuple[Path, list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    more: tuple[str, str],
    message: str,
) -> None:
    _, arguments = command
    assert run(monkeypatch, *arguments, *more, "--out", str(tmp_path / "other")) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")
