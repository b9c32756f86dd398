"""An EAGLE-3 head is trained by its own roll-outs, written as a public checkpoint, read back and served equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from deploy.distillation import dspark, eagle3
from tests.support.models import tiny
from tests.support.models.computed_states import computed_target
from tests.unit.distill.training_folder import LENGTH, PROMPT, ROWS
from workers.distill.answers import Answer
from workers.distill.eagle3.head import Eagle3Head
from workers.distill.eagle3.memory import text_bytes
from workers.distill.eagle3.states import TextStates, lengthened, target_probabilities
from workers.distill.eagle3.training import RollOutPlan, RollOutTraining
from workers.distill.memory import HALF
from workers.distill.target_model import load_target
from workers.draft.common.modules.context_window import ContextWindow
from workers.draft.eagle.feature_pass import FeaturePass
from workers.draft.eagle.head_pass import committed_piece
from workers.model.draft_card import WEIGHTS, DraftDescription, is_written_here
from workers.model.drafting.files import load_drafter
from workers.model.drafting.public import PublicModule
from workers.model.formats.registry import read_draft
from workers.model.formats.speculators import write_eagle3
from workers.model.public_shapes import DecoderShape, FeatureShape, RopeShape, TapNorm

CPU = torch.device("cpu")
TAPS, DRAFTED, DEPTHS = (1, 3, 5), tuple(range(0, 96, 2)), 3


ROPE = RopeShape(700.0, most_positions=256)
LLAMA3 = RopeShape(
    700.0,
    "llama3",
    (
        ("factor", 8.0),
        ("high_freq_factor", 4.0),
        ("low_freq_factor", 1.0),
        ("original_max_position_embeddings", 16),
    ),
    most_positions=256,
)


def shape(
    tap_norm: TapNorm = "each", *, is_normed: bool = True, rope: RopeShape = ROPE, feeds_normed: bool = False
) -> FeatureShape:
    body = DecoderShape(48, 6, 3, 8, 80, 1, 1e-5, rope)
    return FeatureShape(
        body, "wide", len(TAPS), 48, tap_norm, keeps_normed_residual=is_normed, feeds_normed=feeds_normed
    )


def random_head(of: FeatureShape, rows: int = len(DRAFTED)) -> Eagle3Head:
    """A head of random numbers that bfloat16 holds, so that writing it changes none."""
    torch.manual_seed(3)
    head = Eagle3Head(of, rows)
    with torch.no_grad():
        for value in head.parameters():
            drawn = torch.randn_like(value) * value.shape[-1] ** -0.5
            value.copy_((1 + 0.2 * torch.randn_like(value) if value.dim() == 1 else drawn).bfloat16())
    return head


def write(head: Eagle3Head, directory: Path, file_bytes: int | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    card = DraftDescription("tiny", 96, 48, (), len(DRAFTED), kind="eagle", taps=TAPS, shape=head.shape)
    architectures = ["LlamaForCausalLM"]
    write_eagle3(
        directory,
        card,
        head.weights(torch.tensor(DRAFTED)),
        architectures=architectures,
        speculative_tokens=DEPTHS,
        file_bytes=file_bytes,
    )
    return directory


def served(head: FeaturePass, taps: Tensor, tokens: list[int], known: int) -> list[Tensor]:
    """Logits of the committed text of `known` features, and of steps that feed back their own outputs."""
    window = ContextWindow(head.context_shape, CPU)
    piece = committed_piece(window, 0, tokens[1 : known + 1], 1 << 20)
    outputs = head.run(head.features(taps[:known]), [replace(piece, wanted=range(known))])
    window.mark(0, known)
    found = [head.logits(outputs)]
    for position in range(known, known + DEPTHS - 1):
        piece = committed_piece(window, position, tokens[position + 1 : position + 2], 1 << 20)
        outputs = head.run(outputs[-1:], [piece])
        window.mark(position, position + 1)
        found.append(head.logits(outputs))
    return found


@pytest.mark.parametrize(
    "of",
    [
        shape(),
        shape("none", is_normed=False),
        shape("joint"),
        shape("each", feeds_normed=True),
        shape("none", rope=LLAMA3),
    ],
    ids=["each", "none", "joint", "normed outputs", "llama3"],
)
def test_what_is_trained_is_what_is_served(
    directory: Path, target: PreTrainedModel, tmp_path: Path, of: FeatureShape
) -> None:
    """Depth d of a roll-out at a position is step d of a draft that ends there, for every position of a text."""
    head = random_head(of)
    tokens = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(1))
    taps = torch.randn(1, 11, len(TAPS) * 48, generator=torch.Generator().manual_seed(2))
    following = target.get_input_embeddings()(tokens[:, 1:])

    with torch.no_grad():
        rolled = [head.logits(one)[0] for one in head(taps, following, DEPTHS)]

    loaded = load_drafter(write(head, tmp_path / "draft"), directory, torch.float32, CPU, "eagle")
    assert isinstance(loaded.module, PublicModule)
    # Trainings write no scaled positions, and so the shape is not the one of the file there.
    passes = FeaturePass(replace(loaded.module, shape=of), loaded.ends, "float32", scratch=tokens.shape[1])
    for known in (1, 4, 9):
        steps = served(passes, taps[0].view(11, len(TAPS), 48), tokens[0].tolist(), known)
        torch.testing.assert_close(steps[0], rolled[0][:known], rtol=1e-5, atol=1e-5)
        for depth in range(1, DEPTHS):
            torch.testing.assert_close(steps[depth][0], rolled[depth][known - 1 + depth], rtol=1e-5, atol=1e-5)


def test_the_checkpoint_is_one_of_the_library_speculators(tmp_path: Path) -> None:
    head = random_head(shape())

    card = read_draft(write(head, tmp_path / "draft"))

    assert card.kind == "eagle" and card.taps == TAPS and card.shape == head.shape
    assert card.target == "tiny" and card.vocabulary_size == len(DRAFTED)
    assert is_written_here(tmp_path / "draft")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == DEPTHS


def test_a_written_head_keeps_the_scaling_of_its_positions(tmp_path: Path) -> None:
    """A head that is trained further may have one."""
    head = random_head(shape(rope=LLAMA3))

    found = read_draft(write(head, tmp_path / "draft")).shape

    assert isinstance(found, FeatureShape)
    rope = found.body.rope
    assert (rope.kind, rope.theta, rope.most_positions) == ("llama3", 700.0, 256)
    assert dict(rope.parameters) == dict(LLAMA3.parameters)


def test_weights_are_spread_over_small_files(directory: Path, tmp_path: Path) -> None:
    head = random_head(shape())

    draft = write(head, tmp_path / "parts", file_bytes=20_000)

    files = sorted(draft.glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 22_000 for file in files)
    index = json.loads((draft / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    module = load_drafter(draft, directory, torch.float32, CPU, "eagle").module
    assert isinstance(module, PublicModule)
    torch.testing.assert_close(module.tensors["fc.weight"], head.fc.weight.detach())


@pytest.mark.parametrize("kind", [dspark, eagle3])
def test_weights_are_in_one_file_unless_a_size_is_chosen(kind: ModuleType, tmp_path: Path) -> None:
    """A packaged draft is one file, and so is what `pilotfish distill` writes, which has no option for the size."""
    needed = ["--target", "none", "--prompts", "none", "--out", "none"]

    assert kind.options(needed).file_bytes is None
    assert kind.options([*needed, "--file-bytes", "20000"]).file_bytes == 20_000
    assert {file.name for file in write(random_head(shape()), tmp_path / "one").iterdir()} == {"config.json", WEIGHTS}


def test_texts_shorter_than_a_roll_out_are_measured(target: PreTrainedModel) -> None:
    """A draft can predict two tokens of an answer of three after a prompt of two."""
    answer = Answer("a", "", 0.0, False, (3, 4), (5, 6, 7))
    texts = TextStates(computed_target(target, TAPS), [answer], max_length=64, batch_tokens=64)
    plan = RollOutPlan(steps=1, depths=8, is_bfloat16=False)

    found = RollOutTraining(target, random_head(shape()), torch.tensor(DRAFTED), plan).measure(texts)

    assert len(found.slots) == 8 and found.slots[2:] == (0.0,) * 6


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["forward_kl", "overlap"])
def test_a_head_learns_to_draft_the_texts(target: PreTrainedModel, answers: tuple[Answer, ...], loss: str) -> None:
    torch.manual_seed(0)
    head = Eagle3Head(shape(), len(DRAFTED))
    texts = TextStates(computed_target(target, TAPS), answers, max_length=64, batch_tokens=128)
    plan = RollOutPlan(steps=60, depths=DEPTHS, learning_rate=1e-2, batch_tokens=240, is_bfloat16=False, loss=loss)
    training = RollOutTraining(target, head, torch.tensor(DRAFTED), plan)
    before = training.measure(texts)
    losses: list[float] = []

    state = training.run(texts, lambda found: losses.append(found.loss), report_seconds=0.0)

    after = training.measure(texts)
    assert state.step == 60 and len(losses) == 60
    assert losses[-1] < 0.8 * losses[0]
    assert after.chain > before.chain + 0.2
    assert after.slots[0] > before.slots[0]


def test_stored_states_are_those_of_the_target(target: PreTrainedModel, answers: tuple[Answer, ...]) -> None:
    some = [answers[0], replace(answers[1], answer=answers[1].answer[:4])]
    texts = TextStates(computed_target(target, TAPS), some, max_length=64, batch_tokens=16)

    batch = texts.batch([1, 0])

    assert batch.lengths.tolist() == [PROMPT + 4, PROMPT + LENGTH] and batch.first.tolist() == [PROMPT - 1] * 2
    found = target.get_decoder()(torch.tensor([[*answers[0].prompt, *answers[0].answer]]), output_hidden_states=True)
    wanted = torch.cat([found.hidden_states[tap][0] for tap in TAPS], dim=-1)
    torch.testing.assert_close(batch.taps[1], wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(batch.final[1], found.last_hidden_state[0], rtol=1e-4, atol=1e-4)
    states = texts._taps.numel() + texts._final.numel()
    assert HALF * states + texts._tokens.nbytes == texts.tokens * text_bytes(shape())


def test_goals_have_the_factor_of_the_target(tmp_path: Path) -> None:
    config = tiny.granite(num_hidden_layers=6, logits_scaling=6.0)
    target = load_target(tiny.save(tmp_path, config), CPU)
    text, vocabulary = (3, 9, 4, 8, 11, 30, 41, 7), torch.tensor(DRAFTED)
    answer = Answer("one", "", 0.0, False, text[:3], text[3:])
    batch = TextStates(computed_target(target, TAPS), [answer], max_length=64, batch_tokens=64).batch([0])

    found = target_probabilities(target, batch.final[0], vocabulary)

    with torch.inference_mode():
        wanted = target(torch.tensor([text])).logits[0].softmax(-1)[:, vocabulary]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_share_of_texts_gets_others_before_it(answers: tuple[Answer, ...]) -> None:
    found = lengthened(answers, 0.5, 64, seed=0)

    longer = [one for one, own in zip(found, answers, strict=True) if one.prompt != own.prompt]
    assert len(longer) == ROWS // 2
    assert all(40 < len(one.prompt) + len(one.answer) <= 64 for one in longer)
    assert [one.answer for one in found] == [one.answer for one in answers]
    assert lengthened(answers, 0.5, 64, seed=0)[0].prompt == found[0].prompt
