"""What `pilotfish-client` sends, what it makes of responses, and when it tries again. No server is needed."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import fields
from typing import Any

import grpc
import pytest

from pilotfish.v1 import common_pb2, generation_pb2
from pilotfish_client import (
    Aborted,
    DeadlineExceeded,
    Delta,
    Finished,
    FinishReason,
    InvalidRequest,
    Message,
    Overloaded,
    Parameters,
    Started,
    Tls,
    TokenLogprob,
    Unavailable,
    UnknownModel,
)
from pilotfish_client.access import make_access
from pilotfish_client.errors import from_rpc_error
from pilotfish_client.events import to_event
from pilotfish_client.progress import FIRST_PAUSE_SECONDS, StreamProgress
from pilotfish_client.requests import make_request

Response = generation_pb2.GenerateResponse


def test_a_prompt_is_a_text_tokens_messages_or_a_whole_request() -> None:
    assert make_request("hi", Parameters()).text == "hi"
    assert list(make_request([1, 2], Parameters()).token_ids.ids) == [1, 2]
    (message,) = make_request([Message("user", "hi")], Parameters()).chat.messages
    assert (message.role, message.content) == ("user", "hi")
    whole = generation_pb2.GenerateRequest(text="hi", bad_words=["no"], n=2)
    request = make_request(whole, Parameters(n=3))
    assert (request.text, list(request.bad_words), request.n, whole.n) == ("hi", ["no"], 3, 2)


def test_parameters_that_are_not_set_are_not_sent() -> None:
    assert make_request("hi", Parameters()) == generation_pb2.GenerateRequest(text="hi")
    parameters = Parameters(
        max_tokens=3, temperature=0.0, seed=0, stop=("x",), logit_bias={7: -1.5}, ignore_eos=False, prediction="p"
    )
    assert make_request("hi", parameters) == generation_pb2.GenerateRequest(
        text="hi",
        sampling=common_pb2.SamplingParameters(
            temperature=0.0, seed=0, logit_bias=[common_pb2.LogitBias(token_id=7, bias=-1.5)]
        ),
        stopping=generation_pb2.StoppingCriteria(max_tokens=3, stop=["x"], ignore_eos=False),
        prediction_text="p",
    )
    thinking = common_pb2.SamplingParameters(thinking=common_pb2.ThinkingBudget(max_tokens=0))
    ranked = generation_pb2.GenerateRequest(text="hi", sampling=thinking, priority=-3)
    assert make_request("hi", Parameters(thinking_token_budget=0, priority=-3)) == ranked


def test_every_parameter_reaches_the_message() -> None:
    plain, unread = make_request("hi", Parameters()), {field.name for field in fields(Parameters)}
    values: list[Any] = [1, "x", (1,), {1: 1.0}]
    for name in tuple(unread):
        for value in values:
            with suppress(InvalidRequest, AttributeError):  # the value has another type
                if make_request("hi", Parameters(**{name: value})) != plain:
                    unread.discard(name)
    assert unread == set()


def test_one_stop_string_is_not_its_characters() -> None:
    assert list(make_request("hi", Parameters(stop="END")).stopping.stop) == ["END"]


@pytest.mark.parametrize(
    ("prompt", "parameters", "words"),
    [
        ([], Parameters(), "prompt: it is empty"),
        ("hi", Parameters(seed=-1), "the parameters do not fit the schema"),
        ("hi", Parameters(max_tokens=1 << 40), "the parameters do not fit the schema"),
        ([Message("user", "hi"), 3], Parameters(), "needed messages alone, found 3"),
        ([3, Message("user", "hi")], Parameters(), "the parameters do not fit the schema: .*Message"),
    ],
)
def test_what_the_schema_cannot_hold_is_refused(prompt: Any, parameters: Parameters, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        make_request(prompt, parameters)


def test_responses_become_events() -> None:
    top = [common_pb2.TopLogprob(token_id=5, logprob=-0.1)]
    logprobs = [common_pb2.TokenLogprobs(token_id=4, logprob=-0.5, top=top)]
    delta = generation_pb2.GenerationDelta(text="a", token_ids=[4], accepted_draft_tokens=1, logprobs=logprobs)
    assert to_event(Response(delta=delta, index=1)) == Delta(1, "a", (4,), 1, (TokenLogprob(4, -0.5, ((5, -0.1),)),))
    end = generation_pb2.GenerationFinished(reason=generation_pb2.FINISH_REASON_LENGTH, stop_string="x")
    event = to_event(Response(finished=end, lossy=True))
    assert isinstance(event, Finished)
    assert (event.reason, event.stop, event.is_lossless) == (FinishReason.LENGTH, "x", False)
    started = generation_pb2.GenerationStarted(request_id="r", model="m", seed=9, prompt_tokens=2)
    assert to_event(Response(started=started)) == Started("r", "m", 9, 2)
    assert to_event(Response()) is None


def test_a_repeated_request_brings_what_was_received() -> None:
    progress = StreamProgress(generation_pb2.GenerateRequest(text="hi", n=2))
    first = generation_pb2.GenerateRequest()
    first.CopyFrom(progress.message())
    assert first.request_id and first.sampling.HasField("seed") and not first.resume
    assert [one.index for one in progress.message().resume] == [0], "an earlier call is ended"
    started = generation_pb2.GenerationStarted(coordinator="c1")
    assert [progress.receive(Response(started=started)) for _ in range(2)] == [True, False]
    delta = generation_pb2.GenerationDelta(token_ids=[4, 5], drafted_tokens=3, accepted_draft_tokens=1)
    assert progress.receive(Response(delta=delta, index=1))
    progress.receive(Response(finished=generation_pb2.GenerationFinished(), index=0))
    again = progress.message()
    assert (again.request_id, again.sampling.seed, again.coordinator) == (first.request_id, first.sampling.seed, "c1")
    nothing, tokens = again.resume
    assert (nothing.index, nothing.token_count, nothing.finished) == (0, 0, True)
    assert (tokens.index, list(tokens.token_ids), tokens.token_count, tokens.finished) == (1, [4, 5], 2, False)
    assert (tokens.drafted_tokens, tokens.accepted_draft_tokens, tokens.target_steps) == (3, 1, 1)
    assert not progress.is_complete and progress.resumptions == 2
    progress.receive(Response(finished=generation_pb2.GenerationFinished(), index=1))
    assert progress.is_complete


def test_a_loss_is_waited_for_until_the_deadline_or_the_patience_ends() -> None:
    progress = StreamProgress(generation_pb2.GenerateRequest(text="hi"))
    lost, busy, wrong = Unavailable("lost"), Overloaded("full"), InvalidRequest("n")
    pauses = [progress.pause(lost, 60.0, 10.0) for _ in range(6)]
    assert pauses[:3] == [FIRST_PAUSE_SECONDS, 2 * FIRST_PAUSE_SECONDS, 4 * FIRST_PAUSE_SECONDS]
    assert pauses[-1] == 1.0
    with pytest.raises(Unavailable, match="lost"):
        progress.pause(lost, 60.0, 0.0)
    with pytest.raises(Overloaded):
        progress.pause(busy, 60.0, 10.0)
    progress.receive(Response(started=generation_pb2.GenerationStarted()))
    assert progress.pause(busy, 60.0, -1.0) == progress.pause(Aborted("cut"), 60.0, -1.0) / 2 == FIRST_PAUSE_SECONDS
    with pytest.raises(InvalidRequest):
        progress.pause(wrong, 60.0, 10.0)
    with pytest.raises(DeadlineExceeded, match="no server continued it: lost"):
        progress.pause(lost, 0.0, 10.0)


class Refusal(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, detail: object = None) -> None:
        self._code, self._detail = code, detail

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "no"

    def trailing_metadata(self) -> object:
        if self._detail is None:
            return None
        text = self._detail if isinstance(self._detail, str) else json.dumps(self._detail)
        return (("a", "b"), ("pilotfish-error-bin", text.encode()))


def test_errors_have_the_fields_of_the_server() -> None:
    full = from_rpc_error(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, {"kind": "Overloaded", "retry_after_seconds": 4}))
    assert isinstance(full, Overloaded) and full.retry_after_seconds == 4.0
    wrong = from_rpc_error(Refusal(grpc.StatusCode.INVALID_ARGUMENT, {"field": "n", "bound": "1"}))
    assert isinstance(wrong, InvalidRequest) and (wrong.field, wrong.bound, str(wrong)) == ("n", "1", "no")
    large = from_rpc_error(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, {"kind": "TooLarge", "field": "body"}))
    assert isinstance(large, InvalidRequest) and large.field == "body"
    assert type(from_rpc_error(Refusal(grpc.StatusCode.NOT_FOUND, "{"))) is UnknownModel
    assert type(from_rpc_error(Refusal(grpc.StatusCode.UNAVAILABLE, "[]"))) is Unavailable


def test_addresses_and_files_are_checked() -> None:
    with pytest.raises(ValueError, match="at least one HOST:PORT"):
        make_access([], None, None)
    with pytest.raises(ValueError, match="needed both or neither"):
        Tls(certificate="a.pem")
    with pytest.raises(FileNotFoundError, match=r"ca: needed a known user, found ~no\.body/ca\.pem"):
        Tls(ca="~no.body/ca.pem").credentials()
    access = make_access("a:1", "secret", None)
    assert access.metadata == (("authorization", "Bearer secret"),)
    assert "secret" not in repr(access)


def test_a_key_may_end_a_line() -> None:
    assert make_access("a:1", "secret\n", None).metadata == (("authorization", "Bearer secret"),)


@pytest.mark.parametrize("key", [" \n", "sec\nret", "sec ret", "s\u00e9cret"])
def test_what_no_metadata_holds_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ValueError, match="api_key: needed printable ASCII characters without spaces") as refused:
        make_access("a:1", key, None)
    assert key not in str(refused.value)
