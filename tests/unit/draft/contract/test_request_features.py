"""The contract of every drafting method with the features of requests: drafts change nothing that a client receives.

Each request has one to five features, drawn at random, and they run together with others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random

import pytest

from cluster.core.errors import InvalidRequest
from cluster.wire.generation_client import GenerationClient
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.slow import slow_but
from tests.unit.draft.contract.methods import NAMES, Directories, cases_of
from tests.unit.draft.contract.test_streams import PHRASE, TIMEOUT_SECONDS, parameters, serving

COUNT = 200
AT_ONCE = 24
"""Requests that run or wait together."""
TOLERANCE = 1e-4
"""Largest difference of log-probabilities: forward passes of other shapes round otherwise."""
SCHEMA = '{"type": "object", "properties": {"fish": {"enum": ["hello", "the world"]}}, "required": ["fish"]}'
Request = generation_pb2.GenerateRequest
Draw = Callable[[Random, Request], None]


@dataclass
class Answer:
    """What a client receives of one answer."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    finished: generation_pb2.GenerationFinished = field(default_factory=generation_pb2.GenerationFinished)

    @property
    def end(self) -> tuple[object, ...]:
        end, usage = self.finished, self.finished.usage
        return (end.reason, end.stop_string, end.stop_token_id, end.seed, usage.prompt_tokens, usage.completion_tokens)


@dataclass
class Received:
    """What a client receives of one request."""

    refusal: str = ""
    prompt_logprobs: Sequence[common_pb2.TokenLogprobs] = ()
    answers: dict[int, Answer] = field(default_factory=dict)


def bias(draw: Random, request: Request) -> None:
    for token in draw.sample(range(2, 300), 3):
        request.sampling.logit_bias.add(token_id=token, bias=draw.choice([-100, 3, 8]))


def bad_words(draw: Random, request: Request) -> None:
    for _ in range(20):
        request.sampling.bad_words.add(ids=[draw.randrange(3, 282) for _ in range(draw.randint(1, 2))])


def grammar(draw: Random, request: Request) -> None:
    kinds = [{"json_object": True}, {"json_schema": SCHEMA}, {"regex": "(hello|fish) [a-f]{4,9}[.]"}]
    kinds += [{"grammar": 'start: ("hello " | "fish ")+ "."'}, {"choice": common_pb2.Choices(texts=["hell", "hello"])}]
    request.sampling.grammar.CopyFrom(common_pb2.Grammar(**draw.choice(kinds)))  # type: ignore[arg-type]
    request.stopping.ClearField("ignore_eos")


def sampled(name: str, *choices: float) -> Draw:
    return lambda draw, request: setattr(request.sampling, name, draw.choice(choices))


FEATURES: dict[str, Draw] = {
    "top_k": sampled("top_k", 1, 2, 20),
    "top_p": sampled("top_p", 0.01, 0.5, 0.9),
    "min_p": sampled("min_p", 0.02, 0.3, 1),
    "repetition_penalty": sampled("repetition_penalty", 0.5, 1.1, 2),
    "presence_penalty": sampled("presence_penalty", -1, 0.5, 2),
    "frequency_penalty": sampled("frequency_penalty", -2, 0.3, 2),
    "no_repeat_ngram_size": sampled("no_repeat_ngram_size", 1, 2, 3),
    "logprobs": sampled("logprobs", 0, 1, 5),
    "prompt_logprobs": sampled("prompt_logprobs", 0, 3),
    "bias": bias,
    "bad words": bad_words,
    "grammar": grammar,
    "bad texts": lambda draw, request: request.sampling.bad_texts.extend(draw.sample(["he", "a", "é", "fish"], 2)),
    "allowed": lambda draw, request: request.sampling.allowed_token_ids.extend(draw.sample(range(2, 300), 40)),
    "stop tokens": lambda draw, request: request.stopping.stop_token_ids.extend(draw.sample(range(3, 282), 30)),
    "min_tokens": lambda draw, request: setattr(
        request.stopping, "min_tokens", draw.randint(0, request.stopping.max_tokens)
    ),
    "include_stop": lambda _, request: setattr(request.stopping, "include_stop", True),
    "n": lambda draw, request: setattr(request, "n", draw.choice([2, 3])),
    "best_of": lambda _, request: setattr(request, "best_of", 3),
    "cache_salt": lambda draw, request: setattr(request, "cache_salt", draw.choice("ab")),
}


def drawn(number: int) -> tuple[Request, list[str]]:
    """A request, and the names of its features. Its prompt repeats a phrase, or is cut."""
    draw = Random(number)
    request = Request(sampling=parameters(seed=draw.getrandbits(64), temperature=draw.choice([0, 0, 0.3, 0.8, 1, 2])))
    request.stopping.max_tokens = draw.choice([1, 2, 3, 12, 24])
    if draw.random() < 0.7:
        prompt = [*[50 + number % 3] * draw.choice([1, 9]), *PHRASE * draw.randint(1, 3), *PHRASE[: number % 7]]
        request.token_ids.ids.extend(prompt)
    else:
        request.text = "hello world the fish swim " * 3
        request.prompt_options.truncate = draw.choice([-1, 1, 7])
    request.stopping.ignore_eos = draw.random() < 0.5
    if draw.random() < 0.1:
        request.sampling.temperature, request.best_of = 0, draw.choice([2, 3])
        request.beam_search.length_penalty = draw.choice([0, 1, 2])
        return request, ["beams"]
    names = draw.sample(sorted(FEATURES), draw.randint(1, 5))
    for name in names:
        FEATURES[name](draw, request)
    return request, names


def with_stops_and_prediction(number: int, request: Request, plain: Received) -> Request:
    """The request with a stop string out of its answer, in most cases, and with its answer as a prediction."""
    draw, changed = Random(-number), Request.FromString(request.SerializeToString())
    if plain.answers and not request.HasField("beam_search"):
        answer = plain.answers[0]
        if number % 3 and len(answer.text) > 3:
            at = draw.randrange(len(answer.text) - 2)
            changed.stopping.stop.append(answer.text[at : at + draw.randint(1, 4)])
        changed.prediction_token_ids.ids.extend(answer.tokens)
    return changed


async def receive(client: GenerationClient, request: Request, turns: asyncio.Semaphore) -> Received:
    found = Received()
    try:
        async with turns, aclosing(client.generate(request, TIMEOUT_SECONDS)) as responses:
            async for response in responses:
                if response.HasField("started"):
                    found.prompt_logprobs = response.started.prompt_logprobs
                    continue
                answer = found.answers.setdefault(response.index, Answer())
                answer.tokens += response.delta.token_ids
                answer.text += response.delta.text
                answer.logprobs += response.delta.logprobs
                answer.finished.MergeFrom(response.finished)
    except InvalidRequest as error:
        found.refusal = str(error)
    return found


async def receive_all(client: GenerationClient, requests: Sequence[Request]) -> list[Received]:
    turns = asyncio.Semaphore(AT_ONCE)
    return list(await asyncio.gather(*(receive(client, request, turns) for request in requests)))


def assert_close(found: Sequence[common_pb2.TokenLogprobs], expected: Sequence[common_pb2.TokenLogprobs]) -> None:
    assert [(one.token_id, one.rank) for one in found] == [(one.token_id, one.rank) for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert [entry.token_id for entry in one.top] == [entry.token_id for entry in other.top]
        assert [one.logprob, *(entry.logprob for entry in one.top)] == pytest.approx(
            [other.logprob, *(entry.logprob for entry in other.top)], abs=TOLERANCE
        )


def assert_same(found: Received, expected: Received) -> None:
    assert found.refusal == expected.refusal
    assert_close(found.prompt_logprobs, expected.prompt_logprobs)
    assert found.answers.keys() == expected.answers.keys()
    for index, answer in expected.answers.items():
        own = found.answers[index]
        assert (own.tokens, own.text, own.end) == (answer.tokens, answer.text, answer.end)
        assert_close(own.logprobs, answer.logprobs)


@pytest.fixture(scope="module")
def requests_and_plain(directories: Directories) -> tuple[list[Request], list[Received]]:
    """The requests, and what their clients receive of the target alone."""
    first, names = zip(*map(drawn, range(COUNT)), strict=True)

    async def decode() -> tuple[list[Request], list[Received]]:
        async with serving("none", directories) as client:
            free = await receive_all(client, first)
            pairs = enumerate(zip(first, free, strict=True))
            requests = [with_stops_and_prediction(number, *pair) for number, pair in pairs]
            return requests, await receive_all(client, requests)

    requests, plain = asyncio.run(decode())
    assert all(count >= 10 for count in Counter(name for one in names for name in one).values())
    assert sum(bool(one.refusal) for one in plain) < COUNT / 20
    finished = [answer.finished for one in plain if not one.refusal for answer in one.answers.values()]
    ends = Counter((one.reason, bool(one.stop_string), one.HasField("stop_token_id")) for one in finished)
    assert len(ends) == 3 and min(ends.values()) >= 10  # by the length, a stop token and a stop string
    return requests, plain


LOSSLESS = [name for name in NAMES if name != "none" and all(case.is_lossless for case in cases_of(name))]


@pytest.mark.parametrize("name", slow_but(["model+suffix+prediction"], LOSSLESS))
async def test_drafts_change_nothing_that_a_client_receives(
    name: str, directories: Directories, requests_and_plain: tuple[list[Request], list[Received]]
) -> None:
    requests, plain = requests_and_plain
    async with serving(name, directories) as client:
        found = await receive_all(client, requests)
    for request, one, expected in zip(requests, found, plain, strict=True):
        try:
            assert_same(one, expected)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{request}") from error
    usages = [answer.finished.usage for one in found for answer in one.answers.values()]
    assert sum(usage.accepted_draft_tokens for usage in usages) > sum(usage.completion_tokens for usage in usages) / 20
