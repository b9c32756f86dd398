"""The target of a distillation: it answers prompts, here or on a running server, and drafts with a trained module."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from cluster.core.config.sections import Configuration
from cluster.core.errors import InvalidRequest, PilotfishError
from cluster.generation.text.chat_messages import Message
from cluster.generation.text.tokenizer import Tokenizer
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.distillation.conversations import opened, system_messages
from deploy.distillation.served_texts import Server, TextClient
from deploy.local.local_cluster import LocalCluster
from deploy.models import served_name
from deploy.translation.sources import read_sources
from pilotfish.v1 import common_pb2, generation_pb2
from workers.distill.answers import Answer, AnswerFile, Leading
from workers.distill.job import Quota, ServedTokens
from workers.distill.prompts import Task
from workers.draft.registry import METHODS
from workers.serve.configuration import load_configuration

_QUESTION_TOP_P = 0.95
"""top-p for the questions that the target writes. It leaves out improbable tokens, which are mostly noise."""

_SALT = "distill"
"""The cache salt of the answers that measure a module."""
_MIN_SEQUENCES = 32
"""Conversations in flight at once, unless the configuration allows more, or has room for fewer recurrent states."""


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """The target of a configuration, served in this process unless a server has it. It is a `ServedTarget`."""

    configuration: Configuration
    """The configuration of the target. Its models are named by their directories."""
    server: Server | None = None
    """Answers in the place of this process; it still drafts with modules itself."""
    told: Callable[[str], None] = lambda _: None
    """Gets a line for each request that is sent to the server again."""

    def read_sources(self, path: Path, field: str | None) -> tuple[str, ...]:
        """The sources in a file. Raises `InvalidRequest`, which names the line."""
        return read_sources(path, field)

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text."""
        return _tokenizer(Path(self.configuration.target.path)).encode(text)

    def answer(self, tasks: Iterable[Task], file: AnswerFile, quota: Quota, report: Callable[[int], None]) -> None:
        """Append the target's answers that are not yet in `file`, until the quota is met. Raises `PilotfishError`."""
        configuration = with_many_sequences(self.configuration)
        asyncio.run(answer_all(configuration, tasks, file, quota, report, partial(self._client, configuration)))

    @asynccontextmanager
    async def _client(self, configuration: Configuration) -> AsyncIterator[TextClient]:
        if self.server is None:
            async with local_client(configuration) as client:
                yield client
        else:
            target = configuration.target
            async with self.server.client(Path(target.path), served_name(configuration), self.told) as served:
                yield served

    def draft_with(self, module: Path, kind: str, prompts: Sequence[tuple[int, ...]], most_tokens: int) -> ServedTokens:
        """Answer the prompts greedily with drafts of the module of this kind in a directory."""
        return asyncio.run(_drafted(self.drafting(module, kind), prompts, most_tokens))

    def drafting(self, module: Path, kind: str) -> Configuration:
        """The configuration that drafts with the module of this kind in a directory."""
        method = _method_of(kind)
        values = self.configuration.model_dump(mode="json")
        changes = {"method": method, "methods": (), f"{method}.path": str(module), "controller": "off", "learn": "off"}
        return load_configuration(
            values, {f"draft.{key}": value for key, value in changes.items()} | {"server.grpc_port": 0}
        )


async def _drafted(configuration: Configuration, prompts: Sequence[tuple[int, ...]], most_tokens: int) -> ServedTokens:
    timeout = configuration.limits.max_timeout_seconds
    if configuration.target.tensor_parallel == 1:
        return await _counted(LocalCluster(configuration), prompts, most_tokens, timeout)
    from deploy.distillation.target_ranks import target_ranks  # it needs Ray

    async with target_ranks(configuration) as ranks:
        cluster = LocalCluster(configuration, target=ranks.target)
        return await ranks.guarded(_counted(cluster, prompts, most_tokens, timeout))


async def _counted(
    cluster: LocalCluster, prompts: Sequence[tuple[int, ...]], most_tokens: int, longest: float
) -> ServedTokens:
    """Start the cluster, and count tokens and steps of its answers, each of which takes `longest` seconds at most."""
    async with cluster:
        client = GenerationClient(fixed_address(cluster.grpc_address), cluster.access)

        async def answer(prompt: tuple[int, ...]) -> generation_pb2.Usage:
            request = generation_pb2.GenerateRequest(
                token_ids=common_pb2.TokenIds(ids=prompt),
                sampling=common_pb2.SamplingParameters(temperature=0.0),
                stopping=generation_pb2.StoppingCriteria(max_tokens=most_tokens),
                cache_salt=_SALT,
            )
            events = [event async for event in client.generate(request, longest)]
            return events[-1].finished.usage

        try:
            found = await asyncio.gather(*(answer(prompt) for prompt in prompts))
        finally:
            await client.close()
    tokens, steps = (sum(usage.completion_tokens for usage in found), sum(usage.target_steps for usage in found))
    return ServedTokens(len(prompts), tokens, steps)


def _method_of(kind: str) -> str:
    """The drafting method that loads modules of a kind. Among several, it is the one with the kind's name."""
    names = [name for name, plugin in METHODS.items() if plugin.settings.draft_kind == kind]
    return kind if kind in names else names[0]


@lru_cache(maxsize=1)
def _tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def for_answers(configuration: Configuration) -> Configuration:
    """The configuration without drafts and with free ports."""
    server = configuration.server.model_copy(update={"grpc_port": 0})
    return configuration.model_copy(update={"server": server, "draft": configuration.draft.disabled()})


def with_many_sequences(configuration: Configuration) -> Configuration:
    """The configuration with as many sequences at once as its states have room for, 32 where they say nothing."""
    scheduler = configuration.scheduler
    count = max(_MIN_SEQUENCES, scheduler.max_sequences)
    if (states := configuration.target.kv.sequences) is not None:
        count = max(min(count, states), scheduler.max_sequences)  # more are refused where the states are too few
    changes = {"max_sequences": count, "max_waiting": max(count, scheduler.max_waiting)}
    return configuration.model_copy(update={"scheduler": scheduler.model_copy(update=changes)})


@asynccontextmanager
async def local_client(configuration: Configuration) -> AsyncIterator[TextClient]:
    """A client of a cluster that serves the target in this process, without drafts, while the context lasts."""
    async with LocalCluster(for_answers(configuration)) as cluster:
        client = GenerationClient(fixed_address(cluster.grpc_address), cluster.access)
        try:
            yield client
        finally:
            await client.close()


async def answer_all(
    configuration: Configuration,
    tasks: Iterable[Task],
    file: AnswerFile,
    quota: Quota,
    report: Callable[[int], None],
    connect: Callable[[], AbstractAsyncContextManager[TextClient]] | None = None,
) -> None:
    """Append the answers that are not yet in `file`, until the quota is met.

    Conversations that have begun are finished, and held-out tasks are always answered, unless `quota.ends` comes first.
    As many conversations run at once as the scheduler has sequences. Model paths are local directories. `connect` gives
    what answers, once something has to be; unset: a cluster in this process.

    Raises `PilotfishError`.
    """
    tokenizer = Tokenizer.load(Path(configuration.target.path))
    ends = time.monotonic() + quota.seconds
    waiting: Iterator[Task] = _wanted(tasks, file, quota, ends)
    first = next(waiting, None)
    if first is None:
        return
    waiting = chain((first,), waiting)
    async with connect() if connect is not None else local_client(configuration) as client:
        runner = _ConversationRunner(client, tokenizer, configuration.limits.max_timeout_seconds, quota)

        async def work() -> None:
            for task in waiting:
                async for answer in runner.answers(task):
                    if answer.key not in file.finished:
                        file.append(answer)
                report(file.answer_tokens)

        await together(configuration.scheduler.max_sequences, work, quota.ends)


async def together(count: int, work: Callable[[], Coroutine[Any, Any, None]], ends: float | None) -> None:
    """Run `work` so many times at once, and end all of it at `ends`, on the clock of `time.monotonic`.

    Where one raises a `PilotfishError`, all end and this raises it.
    """
    left = None if ends is None or math.isinf(ends) else max(0.0, ends - time.monotonic())
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(left), asyncio.TaskGroup() as group:
                for _ in range(count):
                    group.create_task(work())
    except ExceptionGroup as failures:
        failure = failures.exceptions[0]
        if isinstance(failure, PilotfishError):  # all tasks fail for the same reason
            raise failure from failures
        raise


def _wanted(tasks: Iterable[Task], file: AnswerFile, quota: Quota, ends: float) -> Iterator[Task]:
    """Yield tasks without an answer until the quota is met. All workers share this iterator."""
    for task in tasks:
        if not task.held_out and (file.answer_tokens >= quota.answer_tokens or time.monotonic() >= ends):
            return
        if f"{task.key}:{max(1, len(task.prompt.turns)) - 1}" not in file.finished:
            yield task


@dataclass(frozen=True, slots=True)
class _ConversationRunner:
    """Runs multi-turn conversations against the cluster."""

    client: TextClient
    tokenizer: Tokenizer
    timeout_seconds: float
    quota: Quota

    async def answers(self, task: Task) -> AsyncIterator[Answer]:
        """Yield the answers to a task's turns. Ends early where the conversation is longer than the context."""
        prompt = task.prompt
        messages = system_messages(prompt)
        try:
            turns = prompt.turns or await self._write_question(messages, task)
        except InvalidRequest:
            return
        for turn, text in enumerate(turns):
            messages.append(Message("user", text))
            tokens = self.tokenizer.encode_chat(messages)
            try:
                answer = await self._answer(tokens, task)
            except InvalidRequest:
                return
            key = f"{task.key}:{turn}"
            written, leading = answer
            yield Answer(key, prompt.category, task.temperature, task.held_out, tokens, written, leading)
            messages.append(Message("assistant", self.tokenizer.decode(written)))

    async def _write_question(self, before: Sequence[Message], task: Task) -> tuple[str, ...]:
        """Let the target write the user's message. Returns one turn, or none if the text is empty."""
        request = generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=opened(self.tokenizer, before)),
            sampling=common_pb2.SamplingParameters(temperature=1.0, top_p=_QUESTION_TOP_P, seed=_seed_of(task)),
            stopping=generation_pb2.StoppingCriteria(max_tokens=self.quota.max_tokens),
        )
        written: list[int] = []
        async for response in self.client.generate(request, self.timeout_seconds):
            if response.WhichOneof("event") == "delta":
                written.extend(response.delta.token_ids)
        text = self.tokenizer.decode(written).strip()
        return (text,) if text else ()

    async def _answer(self, prompt: Sequence[int], task: Task) -> tuple[tuple[int, ...], Leading | None]:
        alternatives = None if task.held_out or not self.quota.alternatives else self.quota.alternatives
        request = generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParameters(temperature=task.temperature, seed=task.seed, logprobs=alternatives),
            stopping=generation_pb2.StoppingCriteria(max_tokens=self.quota.max_tokens),
        )
        answer: list[int] = []
        tokens: list[int] = []
        log_probabilities: list[float] = []
        async for response in self.client.generate(request, self.timeout_seconds):
            if response.WhichOneof("event") == "delta":
                answer.extend(response.delta.token_ids)
                for position in response.delta.logprobs:
                    tokens.extend(other.token_id for other in position.top)
                    log_probabilities.extend(other.logprob for other in position.top)
        if alternatives is None:
            return tuple(answer), None
        shape = (len(answer), alternatives)
        return tuple(answer), Leading(
            np.array(tokens, np.int32).reshape(shape), np.array(log_probabilities, np.float16).reshape(shape)
        )


def _seed_of(task: Task) -> int:
    """The seed of a task. Every task has another, so that equal system messages give different questions."""
    return int.from_bytes(hashlib.blake2b(f"{task.seed}:{task.key}".encode(), digest_size=7).digest())
