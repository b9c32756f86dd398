"""Beam search: the answers of transformers, and each rule by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core import beam
from cluster.core.beam import Beam, BeamState, Candidate
from cluster.core.errors import InvalidRequest
from cluster.core.request import BeamParameters, EarlyStopping, FinishReason
from tests.support.models import tiny
from tests.support.slow import slow_but

END = 2
PROMPT = (5, 17, 33, 60, 8)
AS_TRANSFORMERS_SAYS = {EarlyStopping.YES: True, EarlyStopping.NO: False, EarlyStopping.NEVER: "never"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tiny.save(tmp_path_factory.mktemp("beams"), tiny.llama(), sharpness=2.0)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def most_probable(model: Any, answers: Sequence[Sequence[int]], count: int) -> list[list[Candidate]]:
    """Continuations of each answer by a dense forward pass."""
    tokens = torch.tensor([[*PROMPT, *answer] for answer in answers])  # [beams, length]
    logprobs = model(tokens).logits[:, -1].log_softmax(-1)  # [beams, vocabulary]
    top = logprobs.topk(count)
    return [
        list(zip(ids, values, strict=True))
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]


def searched(
    model: Any, parameters: BeamParameters, max_tokens: int, stops: frozenset[int], forced: int | None = None
) -> BeamState:
    state = beam.start(parameters, max_tokens, stops, forced)
    while not beam.is_done(state):
        answers = [running.tokens for running in state.running]
        state = beam.advance(state, most_probable(model, answers, state.candidates))
    return state


@torch.no_grad()
def by_transformers(
    model: Any, parameters: BeamParameters, max_tokens: int, stops: frozenset[int], forced: int | None = None
) -> list[tuple[tuple[int, ...], float]]:
    """The answers of transformers, cut after their stop token, with their scores."""
    result = model.generate(
        torch.tensor([PROMPT]),
        num_beams=parameters.width,
        num_return_sequences=parameters.width,
        length_penalty=parameters.length_penalty,
        early_stopping=AS_TRANSFORMERS_SAYS[parameters.early_stopping],
        max_new_tokens=max_tokens,
        eos_token_id=sorted(stops),
        forced_eos_token_id=forced,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = [until_stop(sequence[len(PROMPT) :], stops) for sequence in result.sequences.tolist()]
    return list(zip(answers, result.sequences_scores.tolist(), strict=True))


def until_stop(tokens: Sequence[int], stops: frozenset[int]) -> tuple[int, ...]:
    ends = [position for position, token in enumerate(tokens) if token in stops]
    return tuple(tokens[: ends[0] + 1] if ends else tokens)


def frequent(model: Any, count: int) -> frozenset[int]:
    """Tokens that a search reaches early: the most probable ones after the prompt, without the two best."""
    ranked = [token for token, _ in most_probable(model, [()], count + 2)[0]]
    return frozenset(ranked[2:])


@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("width", slow_but([3], [2, 3, 5]))
def test_a_search_gives_the_answers_and_scores_of_transformers(
    model: Any, width: int, length_penalty: float, early_stopping: EarlyStopping
) -> None:
    parameters = BeamParameters(width, length_penalty, early_stopping)
    for stops in (frequent(model, 1), frequent(model, 3)):
        state = searched(model, parameters, 10, stops)
        expected = by_transformers(model, parameters, 10, stops)
        assert [answer.tokens for answer in beam.best(state, width)] == [tokens for tokens, _ in expected]
        assert [answer.score for answer in state.finished] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_the_forced_last_token_gives_the_answers_and_scores_of_transformers(model: Any) -> None:
    stops = frequent(model, 1)
    state = searched(model, BeamParameters(4, 0.7), 6, stops, min(stops))
    expected = by_transformers(model, BeamParameters(4, 0.7), 6, stops, min(stops))
    assert [answer.tokens for answer in state.finished] == [tokens for tokens, _ in expected]
    assert [answer.score for answer in state.finished] == pytest.approx([score for _, score in expected], abs=1e-4)
    assert any(len(answer.tokens) == 6 for answer in state.finished)
    reasons = {len(answer.tokens) == 6: answer.finish for answer in state.finished}
    assert reasons.items() <= {True: FinishReason.LENGTH, False: FinishReason.STOP}.items()


def test_the_parametrised_searches_reach_stop_tokens(model: Any) -> None:
    ends = {
        (answer.finish, len(answer.tokens))
        for length_penalty in (0.0, 1.0)
        for answer in searched(model, BeamParameters(5, length_penalty), 10, frequent(model, 3)).finished
    }
    assert {reason for reason, _ in ends} == {FinishReason.STOP, FinishReason.LENGTH}
    assert len({length for _, length in ends}) > 2


def state_after(*steps: Sequence[Sequence[Candidate]], max_tokens: int = 8, **changes: Any) -> BeamState:
    state = beam.start(BeamParameters(**({"width": 2} | changes)), max_tokens, frozenset({END}))
    for candidates in steps:
        state = beam.advance(state, candidates)
    return state


def test_the_first_token_makes_one_beam_many() -> None:
    state = state_after([[(7, -1.0), (8, -0.5), (9, -2.0)]])
    assert state.running == (Beam((8,), -0.5, 0), Beam((7,), -1.0, 0))


def test_a_beam_names_its_parent_and_may_replace_all_others() -> None:
    state = state_after([[(7, -0.1), (8, -3.0)]], [[(4, -0.5), (5, -0.6)], [(4, -0.5), (5, -0.6)]])
    assert state.running == (Beam((7, 4), -0.6, 0), Beam((7, 5), -0.7, 0))


def test_a_stop_token_counts_only_among_the_best_continuations() -> None:
    state = state_after([[(7, -0.5), (8, -1.0), (END, -1.5)]])
    assert not state.finished
    state = state_after([[(7, -0.5), (END, -1.0), (8, -1.5)]])
    assert [answer.tokens for answer in state.finished] == [(END,)]
    assert [running.tokens for running in state.running] == [(7,), (8,)]


def test_equal_sums_are_ordered_by_beam_and_then_by_token() -> None:
    state = state_after([[(9, -1.0), (8, -1.0)]], [[(6, -1.0), (5, -1.0)], [(4, -1.0), (3, -1.0)]])
    assert [(running.parent, running.tokens) for running in state.running] == [(0, (8, 5)), (0, (8, 6))]


def test_every_answer_ends_at_its_full_length() -> None:
    state = state_after([[(7, -0.5), (END, -1.0), (8, -1.5)]], [[(4, -0.1), (5, -5.0)], [(END, -0.1)]], max_tokens=2)
    assert beam.is_done(state)
    assert not state.running
    assert [(answer.tokens, answer.finish) for answer in state.finished] == [
        ((7, 4), FinishReason.LENGTH),
        ((8, END), FinishReason.STOP),
    ]


def test_a_positive_length_penalty_prefers_the_longer_of_equal_answers() -> None:
    steps = ([[(END, -1.0), (7, -0.5), (8, -9.0)]], [[(END, -0.5), (4, -9.0)], [(4, -9.0)]])
    longer_first = state_after(*steps, length_penalty=1.0)
    shorter_first = state_after(*steps, length_penalty=-1.0)
    assert [len(answer.tokens) for answer in longer_first.finished] == [2, 1]
    assert [len(answer.tokens) for answer in shorter_first.finished] == [1, 2]


def test_early_stopping_decides_when_the_search_ends() -> None:
    # Two answers have ended, at -1.0 ÷ 1 and at -1.5 ÷ 2 (worst: -1.0); the best running beam stands at -2.4 after
    # two tokens: -1.2 at this length, but -0.6 if it reached four tokens at no further cost.
    steps = ([[(END, -1.0), (7, -0.5), (8, -2.0)]], [[(END, -1.0), (4, -1.9)], [(4, -1.9)]])
    done = {early: beam.is_done(state_after(*steps, max_tokens=4, early_stopping=early)) for early in EarlyStopping}
    assert done == {EarlyStopping.YES: True, EarlyStopping.NO: True, EarlyStopping.NEVER: False}
    better = ([[(END, -1.0), (7, -0.5), (8, -2.0)]], [[(END, -1.0), (4, -1.0)], [(4, -1.9)]])
    assert not beam.is_done(state_after(*better, early_stopping=EarlyStopping.NO))


def test_forced_tokens_before_the_answer_count_towards_its_length() -> None:
    state = beam.start(BeamParameters(2), 1, frozenset({END}), forced_start=1)
    assert beam.advance(state, [[(7, -1.0), (END, -3.0)]]).finished[0].score == -0.5


def test_a_search_that_is_done_stays_unchanged() -> None:
    state = state_after([[(7, -0.5), (8, -1.0)]], max_tokens=1)
    assert beam.advance(state, []) is state


def test_each_running_beam_needs_its_candidates() -> None:
    with pytest.raises(InvalidRequest, match="candidates"):
        state_after([[(7, -0.5), (8, -1.0)]], [[(4, -1.0)]])


@pytest.mark.parametrize(("width", "max_tokens"), [(0, 1), (2, 0)])
def test_a_search_without_beams_or_tokens_is_refused(width: int, max_tokens: int) -> None:
    with pytest.raises(InvalidRequest):
        beam.start(BeamParameters(width), max_tokens, frozenset())
