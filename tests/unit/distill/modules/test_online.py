"""A short training on served texts: what it learns from, and which state of the module it keeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cluster.core.errors import ConfigurationError
from tests.support.models import drafting_modules, public_drafts
from workers.distill import online
from workers.distill.online import OnlinePlan, ServedText, train_online
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.files import DraftingModule, load_drafter, load_ends, make_module, parameters_of
from workers.model.drafting.public import PublicModule

CPU = torch.device("cpu")
FIRST, OTHER = (5, 6, 7, 8, 9, 10, 11, 12), (5, 6, 7, 80, 70, 60, 50, 40)
"""Two texts, prompts of two tokens and answers, that the same hidden states come before."""
TAPS = {"heads": (3,), "eagle": (1, 3), "block": (1, 3), "dspark": (1, 2, 3), "dflash": (1, 2, 3), "exit": (3,)}
SLOW = ("eagle", "block", "dspark")
Make = Callable[[str], DraftingModule | PublicModule]


@pytest.fixture
def ends(target_directory: Path) -> TargetEnds:
    card = drafting_modules.card_for(target_directory, "heads", (3,))
    return load_ends(target_directory, card, None, torch.float32, CPU)


@pytest.fixture
def module_of(ends: TargetEnds, target_directory: Path, tmp_path: Path) -> Make:
    """Makes a module of a kind."""

    def make(kind: str) -> DraftingModule | PublicModule:
        torch.manual_seed(0)
        if kind not in ("dspark", "dflash"):
            return make_module(ends, drafting_modules.shapes(48)[kind], TAPS[kind])
        config = public_drafts.speculators_block(kind, aux_hidden_state_layer_ids=TAPS[kind])
        tensors = public_drafts.spark() if kind == "dspark" else public_drafts.block()
        draft = public_drafts.write(tmp_path, config, tensors)
        return load_drafter(draft, target_directory, torch.float32, CPU).module

    return make


def text(tokens: tuple[int, ...], kind: str, first: int = 0) -> ServedText:
    hidden = torch.randn(len(tokens), 48 * len(TAPS[kind]), generator=torch.Generator().manual_seed(1)).bfloat16()
    return ServedText(tokens, max(3, first + 2), first, hidden[first:-1])


@pytest.mark.parametrize("kind", ["heads", *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_the_state_that_predicts_texts_best_that_were_left_out_is_kept(
    ends: TargetEnds, module_of: Make, kind: str
) -> None:
    """Where the texts that are left out differ from the others, learning makes it worse, and nothing of it is kept."""
    module = module_of(kind)
    plan = OnlinePlan(steps=20, measures=2, learning_rate=1e-2)
    before = {name: value.clone() for name, value in parameters_of(module).items()}
    learned = train_online(module, before, ends, [text(FIRST, kind)] * 12, [text(FIRST, kind)] * 4, plan)
    assert all(torch.equal(before[name], value) for name, value in parameters_of(module).items())
    changed = {name for name in before if not torch.equal(before[name], learned[name])}
    assert changed
    assert not any(name.startswith(("selector.", "output_norm")) for name in changed)
    kept = train_online(module, learned, ends, [text(OTHER, kind)] * 12, [text(FIRST, kind)] * 4, plan)
    for name, value in kept.items():
        torch.testing.assert_close(value, learned[name], rtol=1e-6, atol=0)


def test_a_pause_during_a_measure_leaves_out_no_later_one(
    ends: TargetEnds, module_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process stands still while requests run, perhaps for hours."""
    calls: list[None] = []

    def measured(*_: object, **__: object) -> SimpleNamespace:
        calls.append(None)
        if len(calls) == 2:
            time.sleep(3)
        return SimpleNamespace(tokens_per_step=float(len(calls)))

    monkeypatch.setattr(online, "measure", measured)
    module = module_of("heads")
    texts = [text(FIRST, "heads")] * 12
    train_online(module, parameters_of(module), ends, texts, texts[:4], OnlinePlan(steps=20, measures=5))
    assert len(calls) == 6  # before the first step, after each fifth part


@pytest.mark.parametrize("kind", ["heads", *SLOW])
def test_texts_whose_first_hidden_states_are_unknown_are_learned_from(
    ends: TargetEnds, module_of: Make, kind: str
) -> None:
    module = module_of(kind)
    before = parameters_of(module)
    learned = train_online(module, before, ends, [text(FIRST, kind, first=4)], (), OnlinePlan(steps=2))
    assert learned.keys() == before.keys()
    assert any(not torch.equal(before[name], value) for name, value in learned.items())


def test_texts_without_a_token_that_a_draft_can_predict_are_refused(ends: TargetEnds, module_of: Make) -> None:
    module = module_of("heads")
    with pytest.raises(ValueError, match="texts: none has a position to learn from"):
        train_online(module, parameters_of(module), ends, [text(FIRST[:3], "heads")], (), OnlinePlan(steps=1))


@pytest.mark.parametrize("kind", ["heads", *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_a_token_that_was_drafted_wrongly_counts_more(ends: TargetEnds, module_of: Make, kind: str) -> None:
    module = module_of(kind)
    before = {name: value.clone() for name, value in parameters_of(module).items()}

    def learned(failures: tuple[int, ...], weight: float) -> torch.Tensor:
        one = replace(text(FIRST, kind), failures=failures)
        found = train_online(module, before, ends, [one], (), OnlinePlan(steps=3, failure_weight=weight))
        return torch.cat([value.flatten() for value in found.values()])

    usual = learned((), 8.0)
    assert torch.equal(learned((5,), 1.0), usual)
    assert torch.equal(learned((0, 100), 8.0), usual)  # not of the answer
    assert not torch.equal(learned((5,), 8.0), usual)


@pytest.mark.parametrize("kind", ["dflash", "exit"])
def test_modules_that_do_not_learn_are_refused(ends: TargetEnds, module_of: Make, kind: str) -> None:
    module = module_of(kind)
    with pytest.raises(ConfigurationError, match=r"does not learn|must be a DSpark drafter"):
        train_online(module, parameters_of(module), ends, [text(FIRST, kind)], (), OnlinePlan(steps=1))
