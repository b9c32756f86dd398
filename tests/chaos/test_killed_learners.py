"""A process is killed that learns drafts, in the middle of a training: nothing is lost but time.

It is the drafter, or the target that drafts itself. Answers under way stay, the last stored version drafts again, and
trainings go on.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.core.config.sections import Configuration
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.implied_settings import with_implied_settings
from pilotfish.v1 import common_pb2, generation_pb2
from tests.chaos.cluster import ChaosCluster
from tests.integration.tenants.two_keys import configuration
from tests.support.clusters.role_main import FRESH_TEXTS
from tests.support.deadline import deadline
from tests.support.engines.kept_kernels import KEPT
from tests.unit.draft.contract.methods import Directories, make_directories
from workers.serve.configuration import load_configuration
from workers.serve.learning.versions import stored_versions

pytestmark = pytest.mark.slow

SECONDS, REQUEST_SECONDS, POLL_SECONDS = 400.0, 240.0, 0.05
TRAINING_SECONDS = 2.0
"""Pause between two looks at a training, in seconds: it stands still while a request runs."""
TOKENS, LONG = 16, 180
"""Tokens of a taught answer, and of one that is under way during the kill."""
PROGRAM = """
import os, signal, sys
from pathlib import Path
from torch.optim.optimizer import register_optimizer_step_post_hook
from deploy.distillation import learner_process
hold, reached, taken = Path(sys.argv[2]), Path(sys.argv[3]), []
def count(*_):
    taken.append(1)
    if len(taken) == 20 and hold.exists():
        Path(f"{reached}.part").write_text(str(os.getpid()))
        os.rename(f"{reached}.part", reached)
        signal.pause()
register_optimizer_step_post_hook(count)
learner_process.main()
"""
"""The learner's process. While the file `hold` exists, it stops in the middle of a training and writes who it is."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    return make_directories(tmp_path_factory.mktemp("killed"), "llama")


def learning(directories: Directories, placement: str, learned: Path) -> Configuration:
    """Medusa heads that know nothing, with one candidate below each node."""
    values = configuration(directories, "heads").model_dump(mode="json")
    changes = {
        "draft.learn": "on",
        "draft.learn_from": "all",
        "draft.learn_directory": str(learned),
        "draft.placement": placement,
        "draft.heads.candidates": 1,
        "draft.heads.tree": "auto",
        "target.compile_directory": str(KEPT),
    }
    return with_implied_settings(load_configuration(values, changes))


@asynccontextmanager
async def processes(
    settings: Configuration, logs: Path, learner: tuple[str, ...]
) -> AsyncIterator[tuple[ChaosCluster, GenerationClient]]:
    """A target, its coordinator, and a drafter where drafts are made in one, each in a process; and a client."""
    drafters = int(settings.draft.placement == "drafter")
    cluster = ChaosCluster(settings, (1,), drafters, 0, logs, seed=0)
    cluster.learner = learner
    try:
        await cluster.start()
        client = GenerationClient(fixed_address(cluster.doors[0].address))
        while not await client.is_ready():  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(POLL_SECONDS)
        yield cluster, client
        await client.close()
        cluster.check()
    finally:
        await cluster.stop()


def request(number: int, tokens: int = TOKENS, *, store: bool = False) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=[3 + number % 4, 5, 7, 9]),
        sampling=common_pb2.SamplingParameters(temperature=0.0),
        stopping=generation_pb2.StoppingCriteria(max_tokens=tokens, ignore_eos=True),
        return_drafts=True,
        store=store,
    )


async def answered(client: GenerationClient, message: generation_pb2.GenerateRequest) -> tuple[list[int], list[int]]:
    """The tokens of an answer, and all that were drafted for it."""
    tokens, drafted = list[int](), list[int]()
    async for response in client.generate(message, REQUEST_SECONDS):
        tokens += response.delta.token_ids
        drafted += [token for draft in response.delta.drafts for token in draft.token_ids]
    return tokens, drafted


async def drafts(client: GenerationClient) -> list[tuple[list[int], list[int]]]:
    """The answers of the kind that is taught, with their drafts. Nothing is learned from them."""
    return [await answered(client, request(number)) for number in range(4)]


def texts(found: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    return [tokens for tokens, _ in found]


async def teach(client: GenerationClient) -> None:
    """Send so many requests that a training follows."""
    for number in range(2 * FRESH_TEXTS):
        await answered(client, request(number, store=True))


async def trainings(client: GenerationClient) -> float:
    """Trainings that ended well since the process started that learns, as of a step just now."""
    await answered(client, request(0))
    exposition, _ = await client.metrics()
    samples = [sample for family in text_string_to_metric_families(exposition.decode()) for sample in family.samples]
    counts = {one.labels["result"]: one.value for one in samples if one.name == "pilotfish:draft_trainings"}
    return counts["taken"] + counts["dropped"]


async def until(condition: Callable[[], Awaitable[bool]], pause: float = POLL_SECONDS) -> None:
    """Wait until a condition is true; the test has a deadline."""
    while not await condition():  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(pause)


def versions(learned: Path) -> list[int]:
    """The numbers of the stored versions of the only client."""
    folders = [entry for entry in learned.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return stored_versions(folders[0]) if folders else []


def has_ended(process: psutil.Process) -> bool:
    """Whether a process computes no more."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("placement", ["drafter", "target"])
async def test_a_process_killed_in_the_middle_of_a_training_loses_nothing_but_time(
    directories: Directories, tmp_path: Path, placement: str
) -> None:
    learned, hold, reached = tmp_path / "learned", tmp_path / "hold", tmp_path / "reached"
    learner = (sys.executable, "-c", PROGRAM, "normal", str(hold), str(reached))
    settings = learning(directories, placement, learned)
    async with deadline(SECONDS), processes(settings, tmp_path, learner) as (cluster, client):
        untaught = await drafts(client)
        expected, _ = await answered(client, request(0, LONG))
        await teach(client)

        async def is_stored() -> bool:
            return bool(versions(learned))

        async def drafts_otherwise() -> bool:
            return await drafts(client) != untaught

        await until(is_stored)
        hold.touch()
        await until(drafts_otherwise)
        taught, last = await drafts(client), versions(learned)[-1]
        assert texts(taught) == texts(untaught)

        async def has_reached() -> bool:
            return reached.exists()

        await teach(client)
        await until(has_reached)
        training = psutil.Process(int(reached.read_text()))
        (victim,) = (one for one in cluster.victims() if one.name in ("draft-0", f"{placement}-0"))
        owner = psutil.Process(victim.pid)
        assert training.ppid() == victim.pid
        reading = asyncio.create_task(answered(client, request(0, LONG)))
        await asyncio.sleep(POLL_SECONDS)
        assert not reading.done()
        victim.signal(signal.SIGKILL)
        owner.wait(SECONDS)

        async def is_replaced() -> bool:
            cluster.check()
            return bool(cluster.replacements.seconds) and has_ended(training)

        async def drafts_as_taught() -> bool:
            return await drafts(client) == taught

        assert (await reading)[0] == expected
        await until(is_replaced)
        await until(drafts_as_taught)
        assert versions(learned)[-1] == last and await trainings(client) == 0

        async def has_trained() -> bool:
            return await trainings(client) >= 1

        hold.unlink()
        await teach(client)
        await until(has_trained, TRAINING_SECONDS)
        assert texts(await drafts(client)) == texts(untaught)
