"""Every stream equals plain decoding's: in all modes, greedy and sampled, while drafters die and come back at random.

Target, drafters and coordinator are the real ones over real gRPC, on tiny models; a drafter that dies takes its port
and all it knew with it, and comes back elsewhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core.config import Configuration
from cluster.core.errors import DrafterUnavailable
from cluster.core.request import SamplingParameters
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.generation_client import GenerationClient
from cluster.wire.target_client import GrpcTarget
from deploy.commands.generate import Prompt, answer_prompt
from deploy.coordinator_server import CoordinatorServer, fixed_address
from deploy.lossless import NOT_LOSSLESS, with_acceptance
from deploy.settings import load_settings
from pilotfish.v1 import common_pb2, generation_pb2
from tests.support import tiny, tiny_tokenizer
from tests.support.plain_generation import write_alone
from workers.draft.registry import create
from workers.serve.configuration import load_configuration
from workers.serve.worker_server import WorkerHost, host_draft, host_target
from workers.verify.build import build_engine

LOOPBACK = "127.0.0.1"
VOCABULARY = 320
TOKENS = 40
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Ask:
    """One request; its prompt's words are of no importance."""

    seed: int
    sampling: SamplingParameters
    max_draft_tokens: int | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        """Of its own length, with some repetition, so that n-grams are found."""
        draw = random.Random(self.seed)
        phrase = [draw.randrange(3, VOCABULARY) for _ in range(3 + 2 * self.seed)]
        return tuple(phrase + phrase[: self.seed])

    def message(self) -> generation_pb2.GenerateRequest:
        """As the public service takes it."""
        sampling = self.sampling
        return generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=self.prompt),
            sampling=common_pb2.SamplingParameters(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                repetition_penalty=sampling.repetition_penalty,
                presence_penalty=sampling.presence_penalty,
                frequency_penalty=sampling.frequency_penalty,
                seed=sampling.seed,
                logprobs=sampling.logprobs,
            ),
            stopping=generation_pb2.StoppingCriteria(max_tokens=TOKENS, ignore_eos=True),
            max_draft_tokens=self.max_draft_tokens,
        )


MANNERS = (
    SamplingParameters(temperature=0.0),
    SamplingParameters(temperature=0.8, top_p=0.9, seed=11),
    SamplingParameters(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParameters(temperature=1.0, top_k=20, presence_penalty=0.5, seed=2**64 - 1),
    SamplingParameters(temperature=0.0, logprobs=2),
    SamplingParameters(temperature=0.7, min_p=0.05, seed=5, logprobs=0),
)
ASKS = [Ask(seed, MANNERS[seed % len(MANNERS)]) for seed in range(9)]
ASKS += [Ask(9, MANNERS[1], max_draft_tokens=0), Ask(10, MANNERS[0], max_draft_tokens=2)]


@dataclass(frozen=True)
class Told:
    """What came back."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    drafted: int
    accepted: int
    lossy: bool


async def told(client: GenerationClient, asked: Ask) -> Told:
    tokens: list[int] = []
    logprobs: list[float] = []
    lossy: set[bool] = set()
    usage = generation_pb2.Usage()
    async for response in client.generate(asked.message(), PATIENCE_SECONDS):
        tokens.extend(response.delta.token_ids)
        logprobs.extend(entry.logprob for entry in response.delta.logprobs)
        lossy.add(response.lossy)
        usage.MergeFrom(response.finished.usage)
    assert len(lossy) == 1
    return Told(tuple(tokens), tuple(logprobs), usage.drafted_tokens, usage.accepted_draft_tokens, lossy.pop())


@dataclass
class Mortal:
    """A drafter that dies and comes back, at another port and without a memory."""

    configuration: Configuration
    host: WorkerHost | None = None
    lives: int = 0

    async def resolve(self) -> str:
        """Where it lives, if it does."""
        if self.host is None:
            raise DrafterUnavailable("it is dead")
        return self.host.address

    async def revive(self) -> None:
        draft = self.configuration.draft
        method = await asyncio.to_thread(create, draft.method, draft, self.configuration.target)
        host = host_draft(LOOPBACK, method)
        await host.start()
        self.host, self.lives = host, self.lives + 1

    async def die(self) -> None:
        host, self.host = self.host, None
        if host is not None:
            await host.stop()


@dataclass
class Cluster:
    """A target, mortal drafters, and a client."""

    address: str
    client: GenerationClient
    drafters: list[Mortal] = field(default_factory=list)

    async def all(self, asks: Sequence[Ask]) -> list[Told]:
        return list(await asyncio.gather(*(told(self.client, asked) for asked in asks)))

    async def misfortune(self, draw: random.Random) -> None:
        """One drafter after another, for as long as anybody listens."""
        while True:
            victim = draw.choice(self.drafters)
            await asyncio.sleep(draw.uniform(0.02, 0.15))
            await victim.die()
            await asyncio.sleep(draw.uniform(0.0, 0.1))
            await victim.revive()


@asynccontextmanager
async def running(configuration: Configuration) -> AsyncIterator[Cluster]:
    configuration = with_acceptance(configuration)
    async with AsyncExitStack() as stack:
        engine = await asyncio.to_thread(build_engine, configuration.target)
        host = await stack.enter_async_context(host_target(LOOPBACK, engine))
        target = GrpcTarget(fixed_address(host.address))
        stack.push_async_callback(target.close)
        mortals = [Mortal(configuration) for _ in range(configuration.draft.replicas)]
        drafters = []
        for mortal in mortals:
            await mortal.revive()
            stack.push_async_callback(mortal.die)
            drafters.append(GrpcDrafter(mortal.resolve))
            stack.push_async_callback(drafters[-1].close)
        coordinator = CoordinatorServer(configuration, target, drafters)
        stack.push_async_callback(coordinator.stop, 0.0)
        port = await coordinator.start()
        await coordinator.wait_until_ready()
        address = f"{LOOPBACK}:{port}"
        client = GenerationClient(fixed_address(address))
        stack.push_async_callback(client.close)
        yield Cluster(address, client, mortals)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tiny_tokenizer.byte_level(tmp_path_factory.mktemp("target"))
    return tiny.save(directory, tiny.llama(vocab_size=VOCABULARY))


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Right often enough to be accepted, wrong often enough to be rejected."""
    return tiny.blur(target, tmp_path_factory.mktemp("draft"), noise=0.05)


def configure(target: Path, draft: Path, **drafting: Any) -> Configuration:
    drafting = {"method": "model", "max_nodes": 6, "max_depth": 4, "timeout_seconds": 5.0} | drafting
    model = {"path": str(draft), "device": "cpu", "compile": "off", "kv": {"pool_bytes": 4 << 20}}
    if "mode" in drafting:
        model["mode"] = drafting.pop("mode")
    drafting["model"] = model
    return load_configuration(
        {
            "target": {
                "path": str(target),
                "served_name": "tiny",
                "device": "cpu",
                "compile": "off",
                "kv": {"pool_bytes": 8 << 20},
            },
            "draft": drafting,
            "scheduler": {"max_sequences": 8, "max_step_tokens": 64},
            "server": {"grpc_port": 0, "http_port": 0},
        }
    )


@pytest.fixture(scope="module")
def alone(target: Path) -> list[tuple[int, ...]]:
    """What the model writes by itself."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    return [write_alone(model, asked.prompt, asked.sampling, TOKENS) for asked in ASKS]


@pytest.fixture(scope="module")
def logprobs(target: Path, draft: Path) -> list[tuple[float, ...]]:
    """Plain decoding's."""

    async def plainly() -> list[Told]:
        async with running(configure(target, draft, method="none")) as cluster:
            return await cluster.all(ASKS)

    return [answer.logprobs for answer in asyncio.run(plainly())]


CASES: list[dict[str, Any]] = [
    {"method": "ngram", "controller": "off"},
    {"mode": "serial", "controller": "off"},
    {"mode": "run_ahead", "controller": "off"},
    {"mode": "enumerate", "controller": "off"},
    {"mode": "serial", "controller": "auto", "alternate": "on", "replicas": 2},
    {"mode": "run_ahead", "controller": "off", "alternate": "on"},
    {"mode": "run_ahead", "controller": "auto", "replicas": 2},
    {"mode": "enumerate", "controller": "off", "alternate": "on", "replicas": 2},
    {"mode": "enumerate", "controller": "auto"},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(str(value) for value in case.values()))
async def test_drafters_that_die_and_come_back_change_no_token(
    case: dict[str, Any], target: Path, draft: Path, alone: list[tuple[int, ...]], logprobs: list[tuple[float, ...]]
) -> None:
    """First all drafters live, then they die at random."""
    async with asyncio.timeout(PATIENCE_SECONDS), running(configure(target, draft, **case)) as cluster:
        calm = await cluster.all(ASKS)
        dying = asyncio.create_task(cluster.misfortune(random.Random(str(case))))
        rough: list[list[Told]] = []
        while not any(mortal.lives > 1 for mortal in cluster.drafters):
            rough.append(await cluster.all(ASKS))
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
    for answers in (calm, *rough):
        assert [answer.tokens for answer in answers] == alone
        assert [answer.logprobs for answer in answers] == logprobs
        assert not any(answer.lossy for answer in answers)
        assert answers[9].drafted == 0, "a request without speculation was drafted for"
    if case.get("controller") == "off":
        assert sum(answer.accepted for answer in calm) > 0


async def test_a_drafter_that_came_back_is_used_again(target: Path, draft: Path, alone: list[tuple[int, ...]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), running(configure(target, draft, controller="off")) as cluster:
        await cluster.drafters[0].die()
        without = await cluster.all(ASKS)
        await cluster.drafters[0].revive()
        for _ in range(100):
            again = await cluster.all(ASKS[:1])
            if again[0].accepted:
                break
            await asyncio.sleep(0.05)
    assert sum(answer.drafted for answer in without) == 0
    assert again[0].accepted > 0
    assert [answer.tokens for answer in (*without, *again)] == [*alone, alone[0]]


@pytest.mark.parametrize("mode", ["serial", "run_ahead"])
async def test_with_synthetic_acceptance_every_answer_says_that_it_is_not_lossless(
    mode: str, target: Path, draft: Path, alone: list[tuple[int, ...]]
) -> None:
    """And with one rate it is the same answer, drafted or not: what chance accepts belongs to seed and position."""
    drafting = {"controller": "off", "synthetic": {"acceptance": (0.7,), "seconds": 0.0, "mode": mode}}
    asks = [Ask(asked.seed, asked.sampling, most) for asked in ASKS[:4] for most in (None, 0, 2)]
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        running(configure(target, draft, method="synthetic", **drafting)) as cluster,
    ):
        answers = await cluster.all(asks)
        exposition, _ = await cluster.client.metrics()
        notices: list[str] = []
        prompt = Prompt("hello", raw=True, max_tokens=4)
        await answer_prompt(
            load_settings(), prompt, cluster.address, in_process=False, write=lambda _: None, notice=notices.append
        )
    assert all(answer.lossy for answer in answers)
    assert b'pilotfish:lossless{model_name="tiny"} 0.0' in exposition
    assert notices[0] == NOT_LOSSLESS
    for first in range(0, len(asks), 3):
        drafted, plain, short = answers[first : first + 3]
        assert drafted.tokens == plain.tokens == short.tokens != alone[first // 3]
        assert drafted.accepted > short.accepted > plain.accepted == 0
