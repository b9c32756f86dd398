"""A short training on served texts: what it learns from, and which state of the module it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.models import drafting_modules
from workers.distill.modules.online import LearningModule, OnlinePlan, ServedText, train_online
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.files import load_ends, make_module
from workers.model.drafting.heads import MedusaHeads

CPU = torch.device("cpu")
FIRST, OTHER = (5, 6, 7, 8, 9, 10, 11, 12), (5, 6, 7, 80, 70, 60, 50, 40)
"""Two texts, prompts of two tokens and answers, that the same hidden states come before."""
TAPS = {"heads": (3,), "eagle": (1, 3)}


@pytest.fixture
def ends(target_directory: Path) -> TargetEnds:
    card = drafting_modules.card_for(target_directory, "heads", (3,))
    return load_ends(target_directory, card, None, torch.float32, CPU)


def module_of(ends: TargetEnds, kind: str) -> LearningModule:
    torch.manual_seed(0)
    module = make_module(ends, drafting_modules.shapes(48)[kind], TAPS[kind])
    assert isinstance(module, MedusaHeads | EagleHead)
    return module


def text(tokens: tuple[int, ...], kind: str, first: int = 0) -> ServedText:
    hidden = torch.randn(len(tokens), 48 * len(TAPS[kind]), generator=torch.Generator().manual_seed(1)).bfloat16()
    return ServedText(tokens, max(3, first + 2), first, hidden[first:-1])


@pytest.mark.parametrize("kind", ["heads", pytest.param("eagle", marks=pytest.mark.slow)])
def test_the_state_that_predicts_texts_best_that_were_left_out_is_kept(ends: TargetEnds, kind: str) -> None:
    """Where the texts that are left out differ from the others, learning makes it worse, and nothing of it is kept."""
    module = module_of(ends, kind)
    plan = OnlinePlan(steps=20, measures=2, learning_rate=1e-2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    train_online(module, ends, [text(FIRST, kind)] * 12, [text(FIRST, kind)] * 4, plan)
    learned = {name: value.clone() for name, value in module.state_dict().items()}
    changed = {name for name in before if not torch.equal(before[name], learned[name])}
    assert changed
    assert not any(name.startswith(("selector.", "output_norm")) for name in changed)
    train_online(module, ends, [text(OTHER, kind)] * 12, [text(FIRST, kind)] * 4, plan)
    assert all(torch.equal(learned[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("kind", ["heads", "eagle"])
def test_texts_whose_first_hidden_states_are_unknown_are_learned_from(ends: TargetEnds, kind: str) -> None:
    module = module_of(ends, kind)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    train_online(module, ends, [text(FIRST, kind, first=4)], (), OnlinePlan(steps=2))
    assert any(not torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_texts_without_a_token_that_a_draft_can_predict_are_refused(ends: TargetEnds) -> None:
    with pytest.raises(ValueError, match="texts: none has a position to learn from"):
        train_online(module_of(ends, "heads"), ends, [text(FIRST[:3], "heads")], (), OnlinePlan(steps=1))
