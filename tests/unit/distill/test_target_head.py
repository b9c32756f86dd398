"""The target's probabilities follow from its last hidden states, as far as a request draws from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cluster.core.request import SamplingParameters
from tests.support.models import tiny
from tests.unit.distill.training_folder import LAYERS, PROMPT
from workers.distill import target_head
from workers.distill.answers import Answer
from workers.distill.modules.tap_cache import taps_of
from workers.distill.target_head import TargetHead, read_target_head
from workers.model.draft_card import DraftDescription

WARM = SamplingParameters(temperature=0.7, top_p=0.9, seed=3)
VOCABULARIES = {"all": None, "some": torch.arange(0, tiny.VOCABULARY, 2)}


def card(**changes: Any) -> DraftDescription:
    return replace(DraftDescription("tiny", tiny.VOCABULARY, 48, (), None, kind="eagle"), **changes)


@pytest.fixture
def shown(target: PreTrainedModel, answers: tuple[Answer, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An answer's tokens, the states before each of them, and the target's logits there."""
    answer = answers[0]
    text = (*answer.prompt, *answer.answer)
    (states,) = taps_of(target, [text], [LAYERS])
    before = states[PROMPT - 1 : -1]
    with torch.inference_mode():
        logits = target.get_output_embeddings()(target.get_decoder().norm(before.float()))
    return torch.tensor(answer.answer), before, logits


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_probabilities_are_those_of_a_dense_pass_at_the_temperature_of_the_request(
    directory: Path, shown: Any, vocabulary: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the head is multiplied in parts. A vocabulary has the probabilities of its own tokens alone."""
    tokens, states, logits = shown
    own = torch.arange(tiny.VOCABULARY) if vocabulary is None else vocabulary
    expected = (logits[:, own] / 0.7).softmax(dim=-1).topk(32)
    monkeypatch.setattr(target_head, "_ROWS", 7)
    head = read_target_head(directory, card(), vocabulary)
    assert head is not None
    found = head.leading(states, tokens, WARM)
    can_be_proposed = torch.isin(tokens, own)
    assert can_be_proposed.any() and bool(can_be_proposed.all()) == (vocabulary is None)
    shares = torch.from_numpy(found.log_probabilities).float().exp()[can_be_proposed]
    torch.testing.assert_close(shares, expected.values[can_be_proposed], rtol=2e-3, atol=1e-4)
    assert (torch.from_numpy(found.tokens)[:, 0] == own[expected.indices[:, 0]])[can_be_proposed].all()
    assert (found.tokens[~can_be_proposed.numpy()] == -1).all()


def test_the_token_of_a_greedy_text_gets_half_and_the_rest_is_the_target_s(directory: Path, shown: Any) -> None:
    tokens, states, logits = shown
    head = read_target_head(directory, card(), None)
    assert head is not None
    found = head.leading(states, tokens, SamplingParameters(temperature=0.0))
    expected = 0.5 * logits.softmax(dim=-1) + 0.5 * torch.nn.functional.one_hot(tokens, tiny.VOCABULARY)
    shares = torch.from_numpy(found.log_probabilities).float().exp()
    torch.testing.assert_close(shares, expected.topk(32).values, rtol=2e-3, atol=1e-4)
    assert (found.tokens[:, 0] == tokens.numpy()).all()


@pytest.mark.parametrize(
    "changes",
    [{"allowed_token_ids": (5, 6)}, {"logit_bias": ((5, 1.0),)}, {"presence_penalty": 0.5}, {"min_tokens": 4}],
    ids=lambda one: next(iter(one)),
)
def test_where_a_request_changes_the_distribution_its_tokens_are_certain(
    directory: Path, shown: Any, changes: dict[str, Any]
) -> None:
    tokens, states, _ = shown
    head = read_target_head(directory, card(), None)
    assert head is not None
    found = head.leading(states, tokens, replace(WARM, **changes))
    assert (found.tokens[:, 0] == tokens.numpy()).all() and (found.log_probabilities[:, 0] == 0).all()
    assert (found.tokens[:, 1:] == -1).all()


def test_a_token_whose_state_is_unknown_is_certain(directory: Path, shown: Any) -> None:
    tokens, states, _ = shown
    head = read_target_head(directory, card(), None)
    assert head is not None
    found, whole = (head.leading(known, tokens, WARM) for known in (states[:-1], states))
    assert (found.tokens[:-1] == whole.tokens[:-1]).all()
    assert found.tokens[-1].tolist() == [int(tokens[-1]), *[-1] * 31]


def test_a_low_temperature_leaves_no_probability_that_is_not_a_number() -> None:
    head = TargetHead(torch.eye(40) * 1000, None, 0.0)
    found = head.leading(torch.eye(40)[:3], torch.tensor([0, 1, 5]), SamplingParameters(temperature=1e-9))
    assert found.tokens[:, 0].tolist() == [0, 1, 2]
    assert (found.tokens[:, 1:] == -1).all() and (found.log_probabilities[:, 0] == 0).all()


def test_a_target_without_a_plain_norm_has_no_such_head(tmp_path: Path) -> None:
    target = tiny.save(tmp_path / "target", tiny.gpt2())
    assert read_target_head(target, card(hidden_size=48), None) is None
