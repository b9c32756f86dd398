"""The target answers whole conversations up to the quota. Every answer is stored once."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Self

import pytest

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError, InvalidRequest, NotReady, PilotfishError
from cluster.generation.text.chat_messages import Message
from cluster.generation.text.tokenizer import Tokenizer
from cluster.wire.peer_access import OPEN
from deploy.distillation import target as distillation_target
from deploy.distillation.target import LocalTarget, answer_all
from deploy.implied_settings import with_implied_settings
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support.models import tiny_tokenizer
from workers.distill.answers import Answer, AnswerFile, read_answers
from workers.distill.job import Quota
from workers.distill.prompts import Prompt, Task, schedule
from workers.draft.registry import check_learning
from workers.serve.configuration import load_configuration

pytestmark = pytest.mark.slow

TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
ANSWER = (70, 71, 72)
FOREVER = 3600.0


class FakeCluster:
    """Answers every prompt with the same three tokens and two log-probabilities each, or with an error."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []
        self.error: PilotfishError | None = None
        self.grpc_address = "nowhere:0"
        self.access = OPEN

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def generate(
        self, request: generation_pb2.GenerateRequest, timeout_seconds: float
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        for token in ANSWER:
            delta = generation_pb2.GenerationDelta(token_ids=[token])
            if request.sampling.HasField("logprobs"):
                top = [
                    common_pb2.TopLogprob(token_id=token, logprob=-0.5),
                    common_pb2.TopLogprob(token_id=9, logprob=-2),
                ]
                delta.logprobs.append(common_pb2.TokenLogprobs(token_id=token, logprob=-0.5, top=top))
            yield generation_pb2.GenerateResponse(delta=delta)

    async def close(self) -> None:
        return None


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    fake = FakeCluster()
    monkeypatch.setattr(distillation_target, "LocalCluster", lambda configuration: fake)
    monkeypatch.setattr(distillation_target, "GenerationClient", lambda resolve, access: fake)
    return fake


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("target"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture
def configuration(directory: Path) -> Configuration:
    return load_configuration({}, {"target.path": str(directory), "scheduler.max_sequences": 2})


async def ask(
    configuration: Configuration, tasks: Sequence[Task], path: Path, tokens: int = 1000
) -> tuple[Answer, ...]:
    with AnswerFile(path) as file:
        await answer_all(configuration, tasks, file, Quota(tokens, FOREVER, 8, 2), lambda tokens: None)
    return read_answers(path)


def task(*turns: str, system: str | None = None, held_out: bool = False, line: int = 1) -> Task:
    return Task(Prompt("p", line, turns, system), 0, 0.7, 5, held_out)


@pytest.mark.parametrize(
    ("settings", "at_once"),
    [
        ({}, 32),
        ({"scheduler.max_sequences": 40}, 40),
        ({"target.kv.sequences": 6}, 6),
        ({"target.kv.sequences": 60}, 32),
    ],
)
def test_no_more_conversations_run_than_there_is_room_for_states(
    settings: dict[str, int],
    at_once: int,
    configuration: Configuration,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int] = []

    async def answer(configuration: Configuration, *_: object) -> None:
        found.append(with_implied_settings(configuration).scheduler.max_sequences)

    monkeypatch.setattr(distillation_target, "answer_all", answer)
    chosen = load_configuration(configuration.model_dump(mode="json"), settings)
    with AnswerFile(tmp_path / "a.jsonl") as file:
        LocalTarget(chosen).answer([], file, Quota(1, FOREVER, 8, 2), lambda tokens: None)
    assert found == [at_once]


async def test_a_prompt_is_rendered_by_the_chat_template(
    cluster: FakeCluster, configuration: Configuration, directory: Path, tmp_path: Path
) -> None:
    (answer,) = await ask(configuration, [task("Hi", system="Be brief.")], tmp_path / "a.jsonl")

    tokenizer = Tokenizer.load(directory)
    assert answer.prompt == tokenizer.encode_chat([Message("system", "Be brief."), Message("user", "Hi")])
    assert answer.answer == ANSWER
    (request,) = cluster.requests
    assert (request.sampling.temperature, request.sampling.seed, request.stopping.max_tokens) == (
        pytest.approx(0.7),
        5,
        8,
    )


async def test_a_later_turn_contains_the_targets_own_answer(
    cluster: FakeCluster, configuration: Configuration, directory: Path, tmp_path: Path
) -> None:
    first, second = await ask(configuration, [task("One?", "Two?")], tmp_path / "a.jsonl")

    tokenizer = Tokenizer.load(directory)
    said = [Message("user", "One?"), Message("assistant", tokenizer.decode(ANSWER)), Message("user", "Two?")]
    assert first.prompt == tokenizer.encode_chat(said[:1])
    assert second.prompt == tokenizer.encode_chat(said)


async def test_without_a_question_the_target_first_writes_the_users_message(
    cluster: FakeCluster, configuration: Configuration, directory: Path, tmp_path: Path
) -> None:
    first, second = await ask(configuration, [task(system="Sums."), task(system="Sums.", line=2)], tmp_path / "a.jsonl")

    tokenizer = Tokenizer.load(directory)
    written = tokenizer.decode(ANSWER)
    assert first.prompt == second.prompt
    assert first.prompt == tokenizer.encode_chat([Message("system", "Sums."), Message("user", written)])
    inventing = [request for request in cluster.requests if request.sampling.temperature == 1]
    assert [tuple(request.token_ids.ids) for request in inventing] == [tokenizer.encode("system: Sums.\nuser: ")] * 2
    assert len({request.sampling.seed for request in inventing}) == 2  # the same prefix, another question


async def test_a_chat_template_that_changes_the_users_message_is_refused_if_the_target_writes_it(
    cluster: FakeCluster, configuration: Configuration, directory: Path, tmp_path: Path
) -> None:
    loud = shutil.copytree(directory, tmp_path / "loud")
    (loud / "chat_template.jinja").write_text(TEMPLATE.replace("message['content']", "message['content'] | upper"))

    with pytest.raises(ConfigurationError, match="the chat template changes the user's message"):
        await ask(load_configuration({}, {"target.path": str(loud)}), [task()], tmp_path / "a.jsonl")


async def test_the_targets_probabilities_are_stored_with_answers_to_train_on(
    cluster: FakeCluster, configuration: Configuration, tmp_path: Path
) -> None:
    learned, measured = await ask(configuration, [task("a"), task("b", held_out=True, line=2)], tmp_path / "a.jsonl")

    assert learned.leading is not None
    assert learned.leading.tokens.tolist() == [[70, 9], [71, 9], [72, 9]]
    assert learned.leading.log_probabilities.tolist() == [[-0.5, -2.0]] * 3
    assert measured.leading is None


async def test_the_quota_ends_the_tasks_except_for_held_out_ones(
    cluster: FakeCluster, configuration: Configuration, tmp_path: Path
) -> None:
    prompts = [Prompt("p", line, (str(line),)) for line in range(1, 41)]

    answers = await ask(configuration, list(schedule([prompts], (0.0,), 4, 0)), tmp_path / "a.jsonl", tokens=9)

    assert sum(answer.held_out for answer in answers) == 4
    assert 3 <= sum(not answer.held_out for answer in answers) <= 4  # two tasks run at the same time


async def test_a_stored_answer_is_not_generated_again(
    cluster: FakeCluster, configuration: Configuration, tmp_path: Path
) -> None:
    await ask(configuration, [task("a"), task("b", line=2)], tmp_path / "a.jsonl")

    answers = await ask(configuration, [task("a"), task("b", line=2), task("c", line=3)], tmp_path / "a.jsonl")

    assert len(answers) == len(cluster.requests) == 3


async def test_a_conversation_longer_than_the_context_is_skipped(
    cluster: FakeCluster, configuration: Configuration, tmp_path: Path
) -> None:
    cluster.error = InvalidRequest("prompt", 9000, "at most 8192 tokens")

    assert await ask(configuration, [task("a"), task(system="Sums.", line=2)], tmp_path / "a.jsonl") == ()


async def test_an_error_of_the_cluster_ends_the_run_with_that_error(
    cluster: FakeCluster, configuration: Configuration, tmp_path: Path
) -> None:
    cluster.error = NotReady("it is gone")

    with pytest.raises(NotReady, match="it is gone"):
        await ask(configuration, [task("a"), task("b", line=2)], tmp_path / "a.jsonl")


def test_the_cluster_for_answers_has_no_drafts(configuration: Configuration) -> None:
    found = distillation_target.for_answers(configuration)

    assert found.draft.method == "none"
    assert found.server.grpc_port == 0
    assert found.target == configuration.target


@pytest.mark.parametrize("kind", ["heads", "exit"])
def test_no_cluster_of_a_distillation_learns(configuration: Configuration, kind: str) -> None:
    """A server's settings are those of the command, too. Without drafts, and with an exit, learning is refused."""
    values = configuration.model_dump(mode="json")
    serving = load_configuration(values, {"draft.method": "heads", "draft.learn": "on", "draft.heads.path": "heads"})

    answering = distillation_target.for_answers(serving).draft
    measuring = LocalTarget(serving).drafting(Path("module"), kind).draft

    assert (answering.method, measuring.method) == ("none", {"exit": "early_exit"}.get(kind, kind))
    for draft in (answering, measuring):
        check_learning(draft, serving.target)
        assert draft.learn == "off"
