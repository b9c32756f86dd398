"""A cluster learns from the requests of a client that allows it: its drafts improve, for that client alone.

Every text stays, token for token.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import Configuration
from deploy.local import local_cluster
from pilotfish.v1 import common_pb2, generation_pb2
from tests.integration.tenants.two_keys import ALICE, BOB, TwoKeys, configuration, settled, two_keys
from tests.support.engines.kept_kernels import KEPT
from tests.support.models import tiny, tiny_tokenizer
from tests.unit.draft.contract.methods import VOCABULARY, Directories, make_directories
from workers.draft.common.learning import Reservoir
from workers.serve.configuration import load_configuration
from workers.serve.learning.learner import Learner, LearnerOptions, start_learner
from workers.serve.learning.versions import roll_back

pytestmark = pytest.mark.slow

TEXTS = 24
"""Requests after which there is enough to learn from."""
AT_ONCE = 4
WAIT_SECONDS = 180.0


@pytest.fixture(autouse=True)
def _a_prompt_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner's process with the usual priority, short pauses and few texts: a loaded machine does not delay it."""
    command = (sys.executable, "-m", "deploy.distillation.learner_process", "normal")
    options = LearnerOptions(command, fresh_texts=TEXTS, least_held_back=3, idle_seconds=0.2)
    monkeypatch.setattr(local_cluster, "start_learner", partial(start_learner, options=options))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    made = make_directories(tmp_path_factory.mktemp("learning"), "llama")
    tiny_tokenizer.byte_level(made.target)
    return made


def learning(directories: Directories, method: str = "heads", **settings: Any) -> Configuration:
    """A draft that learns, with one candidate below each node, so that drafts do not cover all that may follow.

    The learner's process finds compiled kernels.
    """
    values = configuration(directories, method, settings.pop("sharing", "off")).model_dump(mode="json")
    changes = {"draft.learn": "on", f"draft.{method}.candidates": 1, "target.compile_directory": str(KEPT)}
    if method == "heads":
        changes["draft.heads.tree"] = "auto"
    else:  # a model that knows nothing of the target
        draft = tiny.save(directories.others / "model", tiny.llama(vocab_size=VOCABULARY), seed=9, sharpness=1.0)
        changes |= {"draft.model.path": str(draft), "draft.model.width": 1, "draft.model.lookup": "off"}
        changes |= {"draft.model.compile_directory": str(KEPT), "draft.model.mode": "serial"}
    return load_configuration(values, changes | {f"draft.{name}": value for name, value in settings.items()})


def prompt(number: int) -> list[int]:
    return [3 + number % 4, 5, 7, 9]


async def teach(clients: TwoKeys, key: str, **fields: Any) -> None:
    """Send a few requests again and again, whose answers are what the target writes."""
    for first in range(0, TEXTS, AT_ONCE):
        sent = (
            clients.completed(key, prompt(number), max_tokens=16, allowed_token_ids=None, **fields)
            for number in range(first, first + AT_ONCE)
        )
        await asyncio.gather(*sent)


async def status(clients: TwoKeys, key: str = ALICE) -> dict[str, Any]:
    """What the cluster says of itself, after a step: a step brings what was learned."""
    await clients.completed(BOB, [3, 4], max_tokens=2)
    response = await clients.send(key, "/cluster", method="GET")
    (found,) = response.json()["replicas"]
    return dict(found)


async def version(clients: TwoKeys) -> int:
    return int((await status(clients))["draft_version"])


async def learned(clients: TwoKeys, number: int = 1) -> None:
    """Wait until a version drafts. The learner is asked itself, because it stands still while a request runs."""
    (learner,) = (one for one in gc.get_objects() if isinstance(one, Learner) and one._thread.is_alive())
    end = time.monotonic() + WAIT_SECONDS
    while learner.status().version != number:
        assert time.monotonic() < end, learner.status()
        await asyncio.sleep(0.05)
    assert await version(clients) == number


async def drafted(clients: TwoKeys, key: str) -> tuple[int, list[int]]:
    """How many drafted tokens of taught answers are right, and all that are drafted."""
    right, tokens = 0, []
    for number in range(4):
        request = generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=prompt(number)),
            sampling=common_pb2.SamplingParameters(temperature=0.0),
            stopping=generation_pb2.StoppingCriteria(max_tokens=16, ignore_eos=True),
            return_drafts=True,
            store=False,
        )
        responses = await clients.over_grpc(key, request)
        tokens += [token for one in responses for draft in one.delta.drafts for token in draft.token_ids]
        right += responses[-1].finished.usage.accepted_draft_tokens
    return right, tokens


async def texts(clients: TwoKeys, key: str) -> list[str]:
    """Greedy and sampled answers, also of the kind that was taught."""
    bodies: list[dict[str, Any]] = [
        {"temperature": 0, "allowed_token_ids": None},
        {"temperature": 0.8, "seed": 7, "allowed_token_ids": None},
        {"temperature": 0},
    ]
    found = [await clients.completed(key, prompt(0), max_tokens=24, store=False, **body) for body in bodies]
    return [answer["choices"][0]["text"] for answer in found]


@pytest.mark.parametrize("placement", ["target", "drafter"])
@pytest.mark.parametrize("method", ["heads", "model"])
async def test_what_one_client_teaches_is_drafted_for_it_alone_and_a_rollback_ends_it(
    directories: Directories, tmp_path: Path, method: str, placement: str
) -> None:
    settings = learning(directories, method, learn_directory=str(tmp_path / "learned"), placement=placement)
    async with two_keys(settings) as clients:
        before, expected = await drafted(clients, BOB), await texts(clients, ALICE)
        assert await drafted(clients, ALICE) == before
        await teach(clients, ALICE)
        await learned(clients)
        after = await drafted(clients, ALICE)
        assert after[0] > 1.3 * before[0]
        assert await drafted(clients, BOB) == before
        for key in (ALICE, BOB):
            assert await texts(clients, key) == expected
    async with two_keys(settings) as clients:  # a restart goes on from the last version
        assert await version(clients) == 1
        assert [await drafted(clients, key) for key in (ALICE, BOB)] == [after, before]
        roll_back(tmp_path / "learned")
        await learned(clients, 0)
        assert [await drafted(clients, key) for key in (ALICE, BOB)] == [before, before]
        assert await texts(clients, ALICE) == expected


@pytest.mark.parametrize("placement", ["target", "drafter"])
async def test_nothing_is_collected_without_consent(directories: Directories, placement: str) -> None:
    gc.collect()  # what earlier tests left
    async with two_keys(learning(directories, placement=placement)) as clients:
        await teach(clients, BOB)
        await teach(clients, ALICE, store=False)
        await settled()
        found = await status(clients)
        assert found["draft_learned_texts"] == 0
        assert all(not reservoir.stored_bytes for reservoir in gc.get_objects() if isinstance(reservoir, Reservoir))
        await clients.completed(ALICE, [3, 5, 7], max_tokens=16)
        await settled()
        assert (await status(clients))["draft_learned_texts"] == 1


async def test_with_sharing_between_keys_one_client_teaches_for_all(directories: Directories) -> None:
    async with two_keys(learning(directories, sharing="on")) as clients:
        before = await drafted(clients, BOB)
        await teach(clients, ALICE)
        await learned(clients)
        assert (await drafted(clients, BOB))[0] > 1.3 * before[0]


def _reservoirs() -> list[Reservoir]:
    return [one for one in gc.get_objects() if isinstance(one, Reservoir)]


async def test_by_default_nothing_runs_and_nothing_is_collected(directories: Directories) -> None:
    gc.collect()
    former = _reservoirs()  # gRPC holds ended servers of other tests in this process; these dropped their texts
    assert not any(one.salts() for one in former)
    async with two_keys(learning(directories, learn="off")) as clients:
        await teach(clients, ALICE)
        await settled()
        assert not [one for one in threading.enumerate() if one.name == "learner"]
        assert not [one for one in _reservoirs() if all(one is not other for other in former)]
        assert (await status(clients))["draft_learned_texts"] == 0
