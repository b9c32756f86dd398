"""A running server answers the prompts of a distillation with the texts that the command would write itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from cluster.core.errors import ConfigurationError, InvalidRequest, WorkerUnavailable
from cluster.ingress.access.api_keys import parse_keys
from deploy.distillation import served_texts
from deploy.distillation.conversations import WritingPlan
from deploy.distillation.rank_writer import RankWriter
from deploy.distillation.served_texts import ServedTexts, Server
from deploy.distillation.target import answer_all
from deploy.local.local_cluster import LocalCluster
from deploy.settings import Settings
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.models import tiny_tokenizer
from tests.unit.distill.conftest import Command
from workers.distill.answers import Answer, AnswerFile, read_answers
from workers.distill.job import Quota
from workers.distill.prompts import read_prompts, schedule
from workers.serve.configuration import load_configuration

KEY = "a-key-of-sixteen-characters-and-more"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(tmp_path, monkeypatch, initializer_range=0.15)


@pytest.fixture
def settings(command: Command) -> Settings:
    named = {"path": str(command.target), "device": "cpu", "kv.pool_bytes": 1 << 22, "served_name": "tiny"}
    configuration = load_configuration({}, {f"target.{name}": value for name, value in named.items()})
    any_port = configuration.server.model_copy(update={"http_port": 0, "grpc_port": 0})
    configuration = configuration.model_copy(update={"server": any_port})
    return Settings(configuration, command.directory, api_key=KEY)


@pytest.fixture
async def server(settings: Settings) -> AsyncIterator[Server]:
    """A server that demands an API key."""
    keys = parse_keys(f"someone {KEY}", "keys")
    async with LocalCluster(settings.configuration, http=True, api_keys=keys) as cluster:
        yield Server(settings, cluster.http_url)


@pytest.mark.slow
async def test_answers_and_probabilities_are_those_of_a_cluster_in_this_process(
    server: Server, settings: Settings, command: Command
) -> None:
    """The most probable tokens are equal, too. The model is named, or is the only one of the server."""
    prompts = [read_prompts(command.directory / "questions.jsonl")[:6]]
    told: list[str] = []
    found: list[dict[str, Answer]] = []
    for name in ("here", "there", "unnamed"):
        tasks = schedule(prompts, (0.0, 0.7), 1, 0)
        served = "tiny" if name == "there" else "other"

        def connect(served: str = served) -> object:
            return server.client(command.target, served, told.append)

        with AnswerFile(command.directory / name) as file:
            quota = Quota(60, 3600.0, 8, 4)
            own = None if name == "here" else connect
            await answer_all(settings.configuration, tasks, file, quota, lambda _: None, own)  # type: ignore[arg-type]
        found.append({answer.key: answer for answer in read_answers(command.directory / name)})

    here, *others = found
    assert len(here) > 6 and not told
    for there in others:
        both = here.keys() & there.keys()
        assert len(both) > 6 and sum(there[key].leading is not None for key in both) > 4
        for key in both:
            mine, other = here[key], there[key]
            assert (mine.prompt, mine.answer) == (other.prompt, other.answer)
            if mine.leading is not None and other.leading is not None:
                assert (mine.leading.tokens == other.leading.tokens).all()
                assert (mine.leading.log_probabilities == other.leading.log_probabilities).all()


@pytest.mark.slow
async def test_a_server_with_other_tokens_or_without_the_key_is_refused(
    server: Server, settings: Settings, tmp_path: Path
) -> None:
    other = tiny_tokenizer.byte_level(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    description = json.loads(text)
    vocabulary = description["model"]["vocab"]
    names = list(vocabulary)
    description["model"]["vocab"] = dict(zip(names, [vocabulary[name] for name in names[::-1]], strict=True))
    (other / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(ConfigurationError, match=f"--url {server.url}: its model 'tiny' has other tokens than target"):
        async with server.client(other, "tiny", lambda _: None):
            pass
    with pytest.raises(WorkerUnavailable, match=f"{server.url}/v1/models answered 401"):
        async with Server(replace(settings, api_key=None), server.url).client(other, "tiny", lambda _: None):
            pass


def asking(handle: Callable[[httpx.Request], httpx.Response], told: list[str]) -> ServedTexts:
    client = httpx.AsyncClient(base_url="http://elsewhere:8000", transport=httpx.MockTransport(handle))
    return ServedTexts(client, "tiny", 10, 100, told.append)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before requests are sent again, in seconds. None takes any time."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(served_texts.asyncio, "sleep", sleep)
    return found


async def test_a_request_whose_connection_is_lost_or_that_is_refused_for_now_is_sent_again(
    pauses: list[float],
) -> None:
    bodies: list[dict[str, object]] = []
    told: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        if len(bodies) == 1:
            raise httpx.ConnectError("lost")
        if len(bodies) == 2:
            return httpx.Response(429, json={"error": {"message": "busy"}})
        return httpx.Response(200, json={"choices": [{"token_ids": [5, 6], "logprobs": None}]})

    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=[1, 2, 3]),
        sampling=common_pb2.SamplingParameters(temperature=0.5, seed=7),
        stopping=generation_pb2.StoppingCriteria(max_tokens=20, stop_token_ids=[9]),
    )
    (response,) = [one async for one in asking(answer, told).generate(request, 1.0)]

    assert list(response.delta.token_ids) == [5, 6]
    assert len(told) == 2 and all("http://elsewhere:8000" in line for line in told)
    assert pauses == [1.0, 2.0]
    assert bodies[0] == bodies[2]
    assert bodies[2].items() >= {"prompt": [1, 2, 3], "max_tokens": 7, "seed": 7, "store": False}.items()

    def fail(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("lost")

    with pytest.raises(WorkerUnavailable, match="http://elsewhere:8000"):
        _ = [one async for one in asking(fail, told).generate(request, 1.0)]
    request.token_ids.ids.extend(range(7))
    with pytest.raises(InvalidRequest, match="below 10 tokens"):
        _ = [one async for one in asking(fail, told).generate(request, 1.0)]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"text": "Hello"}, "KeyError"),
        ({"token_ids": None}, "TypeError"),
        ({"token_ids": [1, 2, 3, 4]}, "4 tokens, 3 at most"),
        ({"token_ids": [1, 100]}, "token 100 of a vocabulary of 100"),
        ({"token_ids": [1], "logprobs": {"top_logprobs": [None]}}, "AttributeError"),
        ({"token_ids": [1], "logprobs": {"top_logprobs": [{"token_id:1": -0.5}]}}, "1 probable tokens, 2 wanted"),
        ({"token_ids": [1], "logprobs": {"top_logprobs": [{"token_id:1": -1, "token_id:100": -2}]}}, "token 100 of"),
    ],
)
async def test_an_answer_of_another_form_is_refused_by_the_address(choice: dict[str, object], reason: str) -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"choices": [choice]})

    request = generation_pb2.GenerateRequest(stopping=generation_pb2.StoppingCriteria(max_tokens=3))
    if "logprobs" in choice:
        request.sampling.logprobs = 2
    refused = f"http://elsewhere:8000.*: needed the token ids of an answer; .*{reason}"
    with pytest.raises(WorkerUnavailable, match=refused):
        _ = [one async for one in asking(answer, []).generate(request, 1.0)]


@pytest.mark.parametrize(
    ("said", "waited"),
    [("7", 7.0), ("0.5", 1.0), ("86400", 60.0), ("-3", 1.0), ("nan", 1.0), ("Fri, 31 Dec 1999 23:59:59 GMT", 1.0)],
)
async def test_a_busy_server_is_asked_again_when_it_says_so_within_a_minute(
    pauses: list[float], said: str, waited: float
) -> None:
    told: list[str] = []

    def answer(_: httpx.Request) -> httpx.Response:
        if not pauses:
            return httpx.Response(429, headers={"retry-after": said}, json={"error": {"message": "busy"}})
        return httpx.Response(200, json={"choices": [{"token_ids": [5]}]})

    request = generation_pb2.GenerateRequest(stopping=generation_pb2.StoppingCriteria(max_tokens=1))
    (response,) = [one async for one in asking(answer, told).generate(request, 1.0)]
    assert list(response.delta.token_ids) == [5]
    assert pauses == [waited] and told[0].endswith(f"busy; asked again in {waited:g} s")


async def test_an_answer_that_the_server_aborts_is_asked_for_again(pauses: list[float]) -> None:
    """A server that stops answers with what it has: not the text that the command would write."""
    reasons, told = ["abort", "length"], list[str]()

    def answer(_: httpx.Request) -> httpx.Response:
        choice = {"token_ids": [5] * (3 - len(reasons)), "finish_reason": reasons.pop(0)}
        return httpx.Response(200, json={"choices": [choice]})

    request = generation_pb2.GenerateRequest(stopping=generation_pb2.StoppingCriteria(max_tokens=3))
    (response,) = [one async for one in asking(answer, told).generate(request, 1.0)]
    assert list(response.delta.token_ids) == [5, 5] and not reasons and pauses == [1.0]
    assert told[0].startswith("http://elsewhere:8000") and "the server aborted the answer; asked again" in told[0]


@pytest.mark.parametrize(
    ("models", "tokens"),
    [
        ({"models": []}, {}),
        ({"data": [{"id": "tiny"}]}, {}),
        ({"data": [{"id": "tiny", "max_model_len": 10}]}, {"count": 3}),
        ([], {}),
    ],
)
async def test_a_server_that_says_too_little_is_refused_by_the_address(
    settings: Settings, command: Command, monkeypatch: pytest.MonkeyPatch, models: object, tokens: object
) -> None:
    """The API of another program may lack fields."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=models if request.url.path == "/v1/models" else tokens)

    client = httpx.AsyncClient(base_url="http://elsewhere:8000", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(served_texts, "server_client", lambda *_: client)
    server = Server(settings, "http://elsewhere:8000")
    with pytest.raises(WorkerUnavailable, match="--url http://elsewhere:8000: needed id and max_model_len of each"):
        async with server.client(command.target, "tiny", lambda _: None):
            pass


def test_the_texts_of_a_writer_come_from_the_server_and_no_rank_starts_for_them(
    settings: Settings, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        prompt = json.loads(request.content)["prompt"]
        return httpx.Response(200, json={"choices": [{"token_ids": [prompt[-1]] * 2}]})

    told: list[str] = []
    texts = asking(answer, told)

    class Found(Server):
        def client(self, *_: object) -> object:  # type: ignore[override]
            return self

        async def __aenter__(self) -> ServedTexts:
            return texts

        async def __aexit__(self, *_: object) -> None:
            told.append("closed")

    server = Found(settings, "http://elsewhere:8000")
    with RankWriter(settings.configuration, told.append, 10, server) as writer:
        written = writer.writing()([(3, 4), (5,)], [0.0, 1.0], WritingPlan(4, (), 0))

    assert written == [(4, 4), (5, 5)]
    assert told == ["http://elsewhere:8000 writes texts", "closed"]
    refused = "--max-length: 11 is refused; the target reads texts of 10 tokens at most"
    with (
        RankWriter(settings.configuration, told.append, 11, server) as writer,
        pytest.raises(ConfigurationError, match=refused),
    ):
        writer.writing()
