"""OpenAI's requests as requests of the generation service."""

from __future__ import annotations

import pytest

from cluster.core.config.sections import LimitsSection
from cluster.core.errors import InvalidRequest
from cluster.ingress.openai.translate import chat_request, completion_requests, parameter_names, seed_of
from pilotfish.v1 import generation_pb2
from tests.unit.ingress.openai.test_parse import chat, completion

LIMITS = LimitsSection(max_prompts=2)


def test_a_chat_becomes_one_request() -> None:
    body = chat(
        model="tiny",
        max_completion_tokens=5,
        temperature=0,
        stop="x",
        logprobs=True,
        top_logprobs=2,
        top_k=-1,
        logit_bias={"7": -100},
        stop_token_ids=[9],
        ignore_eos=True,
    )
    request = chat_request(body, "r", 3)
    assert (request.request_id, request.model, request.chat.messages[0].content) == ("r", "tiny", "hi")
    assert (request.stopping.max_tokens, [*request.stopping.stop], [*request.stopping.stop_token_ids]) == (
        5,
        ["x"],
        [9],
    )
    assert request.stopping.ignore_eos
    assert (request.sampling.temperature, request.sampling.logprobs, request.sampling.top_k) == (0.0, 2, 0)
    assert (request.sampling.logit_bias[0].token_id, request.sampling.logit_bias[0].bias) == (7, -100.0)
    assert request.sampling.seed == 3


@pytest.mark.parametrize(
    ("early_stopping", "expected"),
    [
        (None, generation_pb2.EARLY_STOPPING_UNSPECIFIED),
        (False, generation_pb2.EARLY_STOPPING_NO),
        (True, generation_pb2.EARLY_STOPPING_YES),
        ("never", generation_pb2.EARLY_STOPPING_NEVER),
    ],
)
def test_beam_search_has_vllms_parameters(early_stopping: object, expected: int) -> None:
    values = {"use_beam_search": True, "n": 2, "best_of": 4, "length_penalty": 0, "early_stopping": early_stopping}
    for request in (
        chat_request(chat(**values), "r", 3),
        *completion_requests(completion(prompt=["a", "b"], **values), LIMITS, "r", 3),
    ):
        assert (request.n, request.best_of) == (2, 4)
        assert (request.beam_search.length_penalty, request.beam_search.early_stopping) == (0.0, expected)


def test_default_beam_parameters_are_accepted_without_beam_search() -> None:
    body = chat(use_beam_search=False, length_penalty=1, early_stopping=False)
    assert chat_request(body, "r", 3) == chat_request(chat(), "r", 3)


@pytest.mark.parametrize(("name", "value"), [("length_penalty", 0.5), ("early_stopping", True)])
def test_beam_parameters_are_refused_without_beam_search(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match="left out unless use_beam_search is true") as caught:
        chat_request(chat(**{name: value}), "r", 3)
    assert caught.value.field == name


@pytest.mark.parametrize("values", [{"best_of": 2}, {"n": 2, "best_of": 3}, {"n": 2, "use_beam_search": True}])
def test_selected_answers_cannot_be_streamed(values: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match="known once all are generated") as caught:
        completion_requests(completion(stream=True, **values), LIMITS, "r", 3)
    assert caught.value.field == "stream"
    completion_requests(completion(stream=True, n=2, best_of=2), LIMITS, "r", 3)


def test_salt_and_id_are_forwarded() -> None:
    request = chat_request(chat(cache_salt="tenant"), "r", 3)
    assert (request.cache_salt, request.request_id) == ("tenant", "r")


def test_unset_parameters_stay_unset() -> None:
    request = chat_request(chat(), "r", 3)
    for name in ("n", "best_of", "beam_search", "cache_salt"):
        assert not request.HasField(name)  # type: ignore[arg-type]
    assert not request.HasField("model")
    assert not request.sampling.HasField("temperature")
    assert not request.sampling.HasField("logprobs")
    assert not request.stopping.HasField("max_tokens")


def test_prompts_become_requests_with_distinct_ids_and_one_seed_if_the_client_gives_it() -> None:
    requests = completion_requests(completion(prompt=["a", "b"], seed=3, n=2), LIMITS, "r", 3)
    assert [(request.request_id, request.text, request.sampling.seed) for request in requests] == [
        ("r-0", "a", 3),
        ("r-1", "b", 3),
    ]


@pytest.mark.parametrize(("values", "second"), [({}, 4), ({"n": 2}, 5), ({"n": 2, "best_of": 5}, 8)])
def test_a_drawn_seed_gives_every_answer_of_every_prompt_a_seed_of_its_own(values: dict[str, int], second: int) -> None:
    requests = completion_requests(completion(prompt=["a", "b"], **values), LIMITS, "r", 3)
    assert [request.sampling.seed for request in requests] == [3, second]


def test_completions_have_openais_default_length() -> None:
    assert completion_requests(completion(), LIMITS, "r", 3)[0].stopping.max_tokens == 16


def test_more_prompts_than_the_limit_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="'3 prompts' is refused; it must be between 1 and 2 prompts") as caught:
        completion_requests(completion(prompt=["a", "b", "c"]), LIMITS, "r", 3)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize(
    ("values", "field"),
    [({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"), ({"top_logprobs": 2}, "top_logprobs")],
)
def test_parameters_that_contradict_each_other_are_refused(values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest, match="it must be left out") as caught:
        chat_request(chat(**values), "r", 3)
    assert caught.value.field == field


def test_a_seed_is_kept_or_drawn() -> None:
    assert seed_of(chat(seed=2**64 - 1)) == 2**64 - 1
    assert seed_of(chat()) != seed_of(chat())


def test_errors_of_the_service_are_given_the_names_that_the_client_used() -> None:
    assert parameter_names(chat()) == {}
    assert parameter_names(chat(max_completion_tokens=5, logprobs=True, top_logprobs=2)) == {
        "max_tokens": "max_completion_tokens",
        "logprobs": "top_logprobs",
    }
    assert parameter_names(chat(thinking_token_budget=3)) == {
        "thinking": "thinking_token_budget",
        "thinking.max_tokens": "thinking_token_budget",
    }
    assert parameter_names(completion(speculation={"max_draft_tokens": 3})) == {
        "max_draft_tokens": "speculation.max_draft_tokens"
    }
