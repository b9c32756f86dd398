"""Encoder-decoder models behind both APIs: what is called the prompt is the source."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster.core.errors import ContextLengthExceeded, InvalidRequest
from cluster.core.request import FinishReason, GeneratedPart
from cluster.generation.events import Delta, Event, Finished, Started
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.translation.tiny_marian import ENGLISH, FRENCH
from tests.support.translation.translator import END, PADDING, SOURCE_BOUND, Translator, translator

Request = generation_pb2.GenerateRequest


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def chat(*contents: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in contents]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Translator]:
    async with translator(tmp_path) as served:
        yield served


@pytest.mark.parametrize("block", [1, 2, 5, 40])
async def test_a_prompt_is_the_source_and_the_answer_a_text_of_its_own(tmp_path: Path, block: int) -> None:
    async with translator(tmp_path, block=block) as served:
        for french, english in zip(FRENCH, ENGLISH, strict=True):
            events = await served.events(Request(text=french))
            request = served.engine.requests[-1]
            assert (request.source, request.prompt) == (served.tokenizer.encode(french), (PADDING,))
            assert request.source[-1] == END
            assert text_of(events) == english
            started, finished = events[0], events[-1]
            assert isinstance(started, Started)
            assert isinstance(finished, Finished)
            assert started.prompt_tokens == finished.usage.prompt_tokens == len(request.source)


async def test_decoding_is_greedy_unless_the_client_wants_samples(served: Translator) -> None:
    for sampling, expected in (
        (None, 0.0),
        (common_pb2.SamplingParameters(seed=1), 0.0),
        (common_pb2.SamplingParameters(temperature=1.0), 1.0),
    ):
        await served.events(Request(text=FRENCH[0], sampling=sampling))
        assert served.engine.requests[-1].sampling.temperature == expected


async def test_an_answer_may_be_as_long_as_the_decoders_context(served: Translator) -> None:
    await served.events(Request(text=FRENCH[0]))
    assert served.engine.requests[-1].stopping.max_tokens == served.engine.context - 1
    stopping = generation_pb2.StoppingCriteria(max_tokens=served.engine.context)
    *_, finished = await served.events(Request(text=FRENCH[0], stopping=stopping))
    assert isinstance(finished, Finished) and finished.reduced_max_tokens == served.engine.context - 1


@pytest.mark.parametrize(
    ("prompt", "shown"), [({"text": "u " * 60}, r"\d+ tokens"), ({"text": "a" * 2000}, r"at least \d+ tokens")]
)
async def test_a_source_that_is_too_long_is_refused(served: Translator, prompt: Any, shown: str) -> None:
    with pytest.raises(ContextLengthExceeded, match=rf"prompt is too long: {shown} > 48 maximum: .* its encoder reads"):
        await served.events(Request(**prompt))


async def test_tokens_are_a_source_as_they_are(served: Translator) -> None:
    tokens = served.tokenizer.encode(FRENCH[1])
    events = await served.events(Request(token_ids=common_pb2.TokenIds(ids=tokens)))
    assert text_of(events) == ENGLISH[1]
    ids = common_pb2.TokenIds(ids=[5] * (SOURCE_BOUND + 1))
    with pytest.raises(ContextLengthExceeded, match="prompt is too long: 49 tokens > 48 maximum"):
        await served.events(Request(token_ids=ids))


async def test_a_long_source_is_cut_if_the_client_wants_it(served: Translator) -> None:
    tokens = served.tokenizer.encode(FRENCH[0])
    long = common_pb2.TokenIds(ids=[*[5] * SOURCE_BOUND, *tokens])
    options = generation_pb2.PromptOptions(truncate=len(tokens))
    assert text_of(await served.events(Request(token_ids=long, prompt_options=options))) == ENGLISH[0]
    with pytest.raises(InvalidRequest, match=r"truncate_prompt_tokens: 49 .* between 1 and 48"):
        await served.events(
            Request(token_ids=long, prompt_options=generation_pb2.PromptOptions(truncate=SOURCE_BOUND + 1))
        )


async def test_a_resumed_call_has_the_source_again(served: Translator) -> None:
    tokens = served.tokenizer.encode_answer(ENGLISH[2])
    whole = text_of(await served.events(Request(text=FRENCH[2])))
    for count in range(1, len(tokens)):
        part = generation_pb2.ResumedAnswer(token_count=count, token_ids=tokens[:count])
        sampling = common_pb2.SamplingParameters(seed=1)
        served.engine.script = lambda _, count=count: (*tokens[count:], END)
        events = await served.events(Request(text=FRENCH[2], sampling=sampling, resume=[part]))
        request = served.engine.requests[-1]
        assert request.source == served.tokenizer.encode(FRENCH[2])
        assert request.resumed == (GeneratedPart(tokens[:count]),)
        assert served.tokenizer.decode(tokens[:count]) + text_of(events) == whole


async def test_stored_tokens_belong_to_one_source(served: Translator) -> None:
    sampling = common_pb2.SamplingParameters(seed=1)
    await served.events(Request(text=FRENCH[0], request_id="r", sampling=sampling))
    part = generation_pb2.ResumedAnswer(token_count=2)
    await served.events(Request(text=FRENCH[1], request_id="r", sampling=sampling, resume=[part]))
    assert served.engine.requests[-1].resumed == (GeneratedPart(()),)


async def test_the_generation_configuration_of_the_model_holds_for_every_request(served: Translator) -> None:
    served.engine.forced_eos_token_id, served.engine.bad_words = END, ((PADDING,),)
    stopping = generation_pb2.StoppingCriteria(max_tokens=3)
    events = await served.events(Request(text=FRENCH[0], stopping=stopping, bad_words=["street"]))
    request = served.engine.requests[-1]
    assert request.stopping.forced_eos_token_id == END
    assert request.sampling.bad_words == ((PADDING,), served.tokenizer.encode_answer("street"))
    tokens = [token for event in events if isinstance(event, Delta) for token in event.tokens]
    assert tokens == [*served.tokenizer.encode_answer(ENGLISH[0])[:2], END]
    assert text_of(events) == served.tokenizer.decode(tokens)
    search = generation_pb2.BeamSearch()
    await served.events(Request(text=FRENCH[0], beam_search=search, best_of=2))
    assert served.engine.requests[-1].sampling.bad_words == ((PADDING,),)
    stopping = generation_pb2.StoppingCriteria(max_tokens=3, ignore_eos=True)
    await served.events(Request(text=FRENCH[0], stopping=stopping))
    assert served.engine.requests[-1].stopping.forced_eos_token_id is None


async def test_a_resumed_answer_that_has_its_forced_end_has_ended_by_its_length(served: Translator) -> None:
    served.engine.forced_eos_token_id = END
    sampling = common_pb2.SamplingParameters(seed=1)
    stopping = generation_pb2.StoppingCriteria(max_tokens=3)
    tokens = served.tokenizer.encode_answer(ENGLISH[0])
    for received, reason in (((*tokens[:2], END), FinishReason.LENGTH), ((tokens[0], END), FinishReason.STOP)):
        part = generation_pb2.ResumedAnswer(token_count=len(received), token_ids=received)
        request = Request(text=FRENCH[0], sampling=sampling, stopping=stopping, resume=[part])
        ends = [event for event in await served.events(request) if isinstance(event, Finished)]
        assert [(end.reason, end.stop_token) for end in ends] == [
            (reason, END if reason is FinishReason.STOP else None)
        ]


async def test_stored_tokens_with_a_forced_end_belong_to_one_length(served: Translator) -> None:
    served.engine.forced_eos_token_id = END
    sampling = common_pb2.SamplingParameters(seed=1)
    for length, part in ((3, None), (8, generation_pb2.ResumedAnswer(token_count=3))):
        stopping = generation_pb2.StoppingCriteria(max_tokens=length)
        resume = [] if part is None else [part]
        await served.events(
            Request(text=FRENCH[0], request_id="r", sampling=sampling, stopping=stopping, resume=resume)
        )
    assert served.engine.requests[-1].resumed == (GeneratedPart(()),)


async def test_predictions_and_bad_words_are_in_the_language_of_the_answer(served: Translator) -> None:
    await served.events(Request(text=FRENCH[0], prediction_text=ENGLISH[0], bad_words=["street"]))
    request = served.engine.requests[-1]
    assert request.prediction == served.tokenizer.encode_answer(ENGLISH[0])
    assert request.sampling.bad_words == (served.tokenizer.encode_answer("street"),)


class TestOverHttp:
    """OpenAI's API."""

    async def test_completions_translate_the_prompts(self, served: Translator) -> None:
        body = {"prompt": list(FRENCH), "max_tokens": 40, "return_token_ids": True}
        answer = (await served.http.post("/v1/completions", json=body)).json()
        assert [choice["text"] for choice in answer["choices"]] == list(ENGLISH)
        sources = [list(served.tokenizer.encode(french)) for french in FRENCH]
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == sources
        assert answer["usage"]["prompt_tokens"] == sum(map(len, sources))

    async def test_chats_translate_the_last_message_of_the_user(self, served: Translator) -> None:
        messages = chat(("system", "x"), ("user", FRENCH[1]), ("assistant", ENGLISH[1]), ("user", FRENCH[0]))
        answer = (await served.http.post("/v1/chat/completions", json={"messages": messages})).json()
        assert answer["choices"][0]["message"]["content"] == ENGLISH[0]
        counted = (await served.http.post("/tokenize", json={"messages": messages})).json()
        assert (counted["count"], counted["max_model_len"]) == (answer["usage"]["prompt_tokens"], SOURCE_BOUND)

    async def test_messages_translate_it_also_before_a_last_message_of_the_assistant(self, served: Translator) -> None:
        body = {"messages": chat(("user", FRENCH[0]), ("assistant", ENGLISH[1]))}
        answer = (await served.http.post("/v1/messages", json={**body, "max_tokens": 32})).json()
        assert answer["content"][0]["text"] == ENGLISH[0]
        counted = (await served.http.post("/v1/messages/count_tokens", json=body)).json()
        assert counted["input_tokens"] == answer["usage"]["input_tokens"]

    async def test_a_chat_template_makes_the_source(self, tmp_path: Path) -> None:
        template = "{{ messages[0]['content'] }} joue{{ eos_token or '' }}</s>"
        async with translator(tmp_path, template=template) as served:
            messages = chat(("user", "une femme"))
            counted = (await served.http.post("/tokenize", json={"messages": messages})).json()
        assert tuple(counted["tokens"]) == served.tokenizer.encode("une femme joue")

    async def test_the_kind_is_in_the_list_of_models(self, served: Translator) -> None:
        (card,) = (await served.http.get("/v1/models")).json()["data"]
        assert (card["kind"], card["max_source_len"], card["max_model_len"]) == ("encoder-decoder", SOURCE_BOUND, 64)

    @pytest.mark.parametrize(
        ("path", "body", "field", "bound"),
        [
            ("completions", {"prompt": FRENCH[0], "echo": True}, "echo", "does not continue the text that it reads"),
            ("completions", {"prompt": FRENCH[0], "echo": True, "logprobs": 1}, "echo", "does not continue"),
            ("completions", {"prompt": FRENCH[0], "prompt_logprobs": 1}, "prompt_logprobs", "no probabilities"),
            ("completions", {"prompt": FRENCH[0], "suffix": "x"}, "suffix", "not trained to fill in"),
            ("chat/completions", {"messages": chat(("system", "x"))}, "messages", "with a message of the user"),
            (
                "chat/completions",
                {"messages": chat(("user", FRENCH[0]), ("assistant", "a")), "continue_final_message": True},
                "continue_final_message",
                "this model has no chat template",
            ),
            (
                "chat/completions",
                {
                    "messages": chat(("user", FRENCH[0])),
                    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                },
                "tools",
                "this model has no chat template",
            ),
            (
                "chat/completions",
                {"messages": chat(("user", FRENCH[0])), "chat_template_kwargs": {"a": 1}},
                "chat_template_kwargs",
                "this model has no chat template",
            ),
        ],
    )
    async def test_what_has_no_meaning_is_refused_by_name(
        self, served: Translator, path: str, body: dict[str, Any], field: str, bound: str
    ) -> None:
        response = await served.http.post(f"/v1/{path}", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field), error
        assert bound in error["message"]
        assert served.engine.requests == []


async def test_other_models_say_that_they_continue_the_prompt(tmp_path: Path) -> None:
    from tests.support.fakes.http_app import HttpApi

    api = HttpApi(tmp_path)
    async with api.http:
        (card,) = (await api.http.get("/v1/models")).json()["data"]
    assert card["kind"] == "decoder-only"
    assert "max_source_len" not in card
