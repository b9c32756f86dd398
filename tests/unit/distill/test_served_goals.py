"""What is known of served texts becomes the goals of trainings: the target's probabilities, and weights of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.models import drafting_modules, tiny
from tests.support.models.computed_states import computed_target
from tests.unit.distill.eagle3.test_eagle3_training import random_head, shape
from tests.unit.distill.training_folder import LAYERS, LENGTH, PROMPT
from workers.distill.answers import Answer, Leading
from workers.distill.divergence import divergences, forward_kl
from workers.distill.dspark.rows import TextRows
from workers.distill.eagle3.served import ServedTraining
from workers.distill.eagle3.states import TextStates, target_probabilities
from workers.distill.eagle3.training import RollOutPlan
from workers.distill.modules.batches import tap_batch
from workers.distill.modules.path_loss import PathWeights, accepted, path_loss
from workers.distill.modules.paths import predict
from workers.distill.modules.tap_cache import taps_of
from workers.model.drafting.files import load_ends, make_module

CPU = torch.device("cpu")
TAPS, ROW = (1, 3, 5), 48


@pytest.fixture(scope="module")
def known(target: PreTrainedModel, answers: tuple[Answer, ...]) -> list[Answer]:
    """Answers with the target's probabilities of all tokens, and with random weights."""
    draw, found = np.random.default_rng(3), []
    for answer in answers[:4]:
        tokens = torch.tensor([[*answer.prompt, *answer.answer]])
        with torch.inference_mode():
            best = target(input_ids=tokens).logits[0, PROMPT - 1 : -1].log_softmax(-1).topk(tiny.VOCABULARY)
        leading = Leading(best.indices.numpy().astype(np.int32), best.values.numpy().astype(np.float16))
        found.append(replace(answer, leading=leading, weights=draw.uniform(0.5, 2.0, LENGTH).astype(np.float32)))
    return found


@dataclass(frozen=True)
class Cache:
    """Hidden states of answers by their keys. It is a `TapSource`."""

    states: dict[str, Tensor]

    @property
    def width(self) -> int:
        return next(iter(self.states.values())).shape[1]

    def has(self, answer: Answer) -> bool:
        return answer.key in self.states

    def of(self, answer: Answer) -> Tensor:
        return self.states[answer.key]


def states_of(target: PreTrainedModel, answers: list[Answer]) -> dict[str, Tensor]:
    found = taps_of(target, [(*answer.prompt, *answer.answer) for answer in answers], TAPS)
    return {answer.key: states for answer, states in zip(answers, found, strict=True)}


def test_blocks_have_the_probabilities_that_a_pass_of_the_target_gives(
    target: PreTrainedModel, known: list[Answer]
) -> None:
    states = states_of(target, known)
    shown = TextRows.shown(known, lambda answer: states[answer.key], length=ROW)
    computed = TextRows(computed_target(target, TAPS), known, length=ROW)
    rows = torch.arange(shown.rows)
    anchors = torch.tensor([one[:8] for one in shown.all_anchors(rows)])
    (_, found), (_, wanted) = (texts.blocks(rows, anchors, 3) for texts in (shown, computed))
    is_text = wanted.is_text
    assert is_text.any() and torch.equal(found.is_text, is_text)
    torch.testing.assert_close(found.probabilities[is_text], wanted.probabilities[is_text], rtol=2e-2, atol=2e-3)
    assert torch.equal(found.tokens[is_text][:, 0], wanted.tokens[is_text][:, 0])
    assert wanted.weights is None and found.weights is not None
    place = int(anchors[0, 0])
    answer = next(one for one in known if shown.text(0, 0)[: ROW // 2][:PROMPT] == list(one.prompt))
    assert answer.weights is not None
    expected = answer.weights[place - PROMPT + 1 : place - PROMPT + 4]
    assert found.weights[0, 0].tolist() == pytest.approx(expected.tolist())


def test_roll_outs_have_the_probabilities_that_the_target_s_last_states_give(
    target: PreTrainedModel, directory: Path, known: list[Answer]
) -> None:
    """Probabilities are of tokens that the head can propose, times the weight of the predicted token."""
    vocabulary = torch.arange(0, tiny.VOCABULARY, 2)
    card = drafting_modules.card_for(directory, "heads", (3,))
    states = states_of(target, known)
    shown = TextStates.shown(known, lambda answer: states[answer.key]).batch(range(len(known)))
    computed = TextStates(computed_target(target, TAPS), known, max_length=ROW, batch_tokens=64).batch(
        range(len(known))
    )
    ends = load_ends(directory, card, vocabulary, torch.float32, CPU)
    training = ServedTraining(ends, random_head(shape()), RollOutPlan(is_bfloat16=False, steps=1))
    each = shown.tokens.shape[1] - 2
    places = torch.tensor([row * each + place for row in range(len(known)) for place in range(PROMPT - 1, each)])
    found = training._wanted(shown, places)
    final = computed.final[:, 1:-1].flatten(0, 1)[places]
    weights = torch.stack([torch.from_numpy(one.weights)[1:] for one in known if one.weights is not None]).flatten()
    expected = target_probabilities(target, final, vocabulary) * weights.unsqueeze(1)
    torch.testing.assert_close(found, expected, rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_the_token_at_which_a_path_is_rejected_counts_more(
    target: PreTrainedModel, directory: Path, known: list[Answer], weight: float
) -> None:
    """Neither those before it, which are accepted, nor those after it, which the target never gets to."""
    taps = (LAYERS,)
    ends = load_ends(directory, drafting_modules.card_for(directory, "heads", taps), None, torch.float32, CPU)
    states = {one.key: taps_of(target, [(*one.prompt, *one.answer)], taps)[0] for one in known}
    torch.manual_seed(0)
    module = make_module(ends, replace(drafting_modules.shapes(48)["heads"], selector_rank=0), taps)
    batch = tap_batch([replace(one, weights=None) for one in known], Cache(states), ends, ROW)
    with torch.no_grad():
        paths = predict(module, ends, batch)
        found = path_loss(paths, batch, ends, None, PathWeights(0.5, weight), "forward_kl")
        cells = []
        for hidden, row, start in zip(paths.hidden, paths.rows.tolist(), paths.starts.tolist(), strict=True):
            is_accepted = True
            for depth, place in enumerate(range(start, min(start + len(hidden), int(batch.lengths[row])))):
                logits = ends.logits(hidden[depth]).unsqueeze(0)
                leading, logarithms = batch.leading[row, place : place + 1], batch.log_probabilities[row, place]
                divergence = divergences(logits, leading, logarithms.unsqueeze(0), forward_kl)
                is_right = int(logits.argmax()) == int(batch.tokens[row, place])
                cells.append((float(divergence), 0.5**depth * (weight if is_accepted and not is_right else 1.0)))
                is_accepted = is_accepted and is_right
    assert float(found) == pytest.approx(sum(a * b for a, b in cells) / sum(b for _, b in cells), rel=1e-4)
    accepted_lengths = accepted(paths, batch, ends, None)
    assert accepted_lengths.min() == 0 < accepted_lengths.max()


@pytest.mark.parametrize("kind", ["heads", "block", "eagle"])
def test_a_token_s_loss_counts_by_its_weight(
    target: PreTrainedModel, directory: Path, known: list[Answer], kind: str
) -> None:
    """A text of the weight 0 teaches nothing, and the scale of all weights changes nothing."""
    taps = {"heads": (6,), "block": (1, 3), "eagle": (1, 3)}[kind]
    states = {one.key: taps_of(target, [(*one.prompt, *one.answer)], taps)[0] for one in known}
    ends = load_ends(directory, drafting_modules.card_for(directory, kind, taps), None, torch.float32, CPU)
    torch.manual_seed(0)
    module = make_module(ends, drafting_modules.shapes(48)[kind], taps)
    drafting_modules.randomized(module)

    def loss(*weights: float | None) -> Tensor:
        texts = [
            replace(one, weights=None if weight is None else np.full(LENGTH, weight, np.float32))
            for one, weight in zip(known, weights, strict=False)
        ]
        batch = tap_batch(texts, Cache(states), ends, ROW)
        with torch.no_grad():
            return path_loss(predict(module, ends, batch), batch, ends, None, PathWeights(0.8), "forward_kl")

    both, alone = loss(None, None), loss(None)
    assert not torch.isclose(both, alone)
    torch.testing.assert_close(loss(3.0, 3.0), both)
    torch.testing.assert_close(loss(1.0, 0.0), alone)
    mixed = loss(3.0, 1.0)
    torch.testing.assert_close(mixed, (3 * alone + (2 * both - alone)) / 4)
