"""`pilotfish distill` for a target on two ranks: they write texts and show hidden states; no trainer has the target."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen
from threading import Timer
from typing import ClassVar

import psutil
import pytest
import ray
import torch

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError, TargetUnavailable
from cluster.wire.generation_client import GenerationClient
from cluster.wire.target_client import GrpcTarget
from deploy.distillation import one_rank, rank_writer
from deploy.distillation import target_ranks as target_ranks_module
from deploy.distillation.one_rank import TargetRanks
from deploy.distillation.target_ranks import target_ranks
from pilotfish.v1 import generation_pb2
from tests.support.models.plain_generation import greedy_texts
from tests.unit.distill.conftest import Command
from workers.distill.answers import read_answers
from workers.distill.modules.tap_cache import TapCache, states_of, taps_of
from workers.distill.target_model import load_target
from workers.model.model_files import end_of_sequence_ids
from workers.serve.configuration import load_configuration

TAPS, LAYERS, LENGTH = (1, 2), 4, 96
KIND = ("--kind", "eagle3", "--depths", "2", "--vocabulary-size", "64", "--batch-tokens", "256", "--taps", "1,2")
TEXTS = ("--max-length", str(LENGTH), "--temperatures", "0", "--max-tokens", "24")
ON_RANKS = ("--set", "target.tensor_parallel=2", "--set", "target.device=cpu")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command for a target whose heads two ranks can divide."""
    return Command(tmp_path, monkeypatch, num_hidden_layers=LAYERS, num_key_value_heads=2, initializer_range=0.15)


def worker_ranks() -> Iterator[psutil.Process]:
    """The processes of ranks above 0 that this process started."""
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "ray::WorkerRank" in " ".join(one.cmdline()):
                yield one


@pytest.fixture
def rank_ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[psutil.Process]]:
    """The second rank of the group that writes texts, which is killed once, when the first tokens have come."""
    killed: list[psutil.Process] = []
    of_other_tests = set(worker_ranks())

    class Killing(GenerationClient):
        async def generate(
            self, request: generation_pb2.GenerateRequest, timeout_seconds: float
        ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
            async for response in super().generate(request, timeout_seconds):
                yield response
                if not killed:
                    killed.extend(set(worker_ranks()) - of_other_tests)
                    for one in killed:
                        one.kill()

    monkeypatch.setattr(rank_writer, "GenerationClient", Killing)
    for name, value in {"RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    yield killed
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs ray[train]")
def test_ranks_write_texts_and_show_states_and_trainers_never_have_the_target(
    command: Command,
    rank_ends: list[psutil.Process],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rank dies while texts are written. The texts are those of a model of `transformers` all the same."""
    out = command.directory / "draft"

    code = command.run_words(command.words(out, *KIND, *TEXTS, *ON_RANKS, "--steps", "4", "--workers", "2"))

    said = " ".join(capsys.readouterr().err.split())
    assert code == 0, said
    assert len(rank_ends) == 1 and not rank_ends[0].is_running()
    assert (out / "model.safetensors").exists()
    assert "tokens per step on held out, as it is served" in said
    target = load_target(command.target, torch.device("cpu"))
    answers = read_answers(command.work / "answers.jsonl")
    assert sum(one.held_out for one in answers) == 2 and len(answers) == 20
    expected = greedy_texts(target, [one.prompt for one in answers], 24, end_of_sequence_ids(command.target))
    assert [one.answer for one in answers] == expected
    stored = TapCache(states_of(command.target, command.work / "states"), (*TAPS, LAYERS), 48, LENGTH)
    known = [one for one in answers if stored.has(one)]
    assert len(known) > len(answers) // 2  # some were lengthened
    for one in known:
        (states,) = taps_of(target, [(*one.prompt, *one.answer)], stored.taps)
        torch.testing.assert_close(stored.of(one).float(), states.float(), rtol=2**-7, atol=2e-3)


@pytest.mark.slow
def test_one_rank_writes_texts_in_the_process_of_the_command(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """The texts are those of a model of `transformers`, and Ray is not needed."""
    out, device = command.directory / "draft", ("--set", "target.device=cpu")

    code = command.run_words(command.words(out, *KIND, *TEXTS, *device, "--steps", "2"))

    said = " ".join(capsys.readouterr().err.split())
    assert code == 0, said
    assert "the target starts on 1 rank, to write texts" in said
    assert "tokens per step on held out, as it is served" in said
    assert not ray.is_initialized()
    answers = read_answers(command.work / "answers.jsonl")
    target = load_target(command.target, torch.device("cpu"))
    expected = greedy_texts(target, [one.prompt for one in answers], 24, end_of_sequence_ids(command.target))
    assert len(answers) == 20 and [one.answer for one in answers] == expected


@pytest.mark.parametrize(
    ("kind", "given"), [("layers", "--plan"), ("heads", "--plan"), ("heads", "--steps=1"), ("table", "--steps=1")]
)
def test_kinds_for_which_one_process_has_the_target_are_refused_on_ranks(
    kind: str, given: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--kind", kind, *ON_RANKS, given, "--prompts", str(command.directory / "questions.jsonl"), "--out", "out"]

    assert command.run_words(words) == 2

    said = " ".join(capsys.readouterr().err.split())
    assert f"target.tensor_parallel: 2 is refused for kind {kind}" in said


class Supervisor:
    """Gives up once its ranks cannot start any more. It is a `RankSupervisor`."""

    is_lost = False

    def check_health(self) -> None:
        if self.is_lost:
            raise TargetUnavailable("the last 3 starts of the ranks failed")


async def test_work_ends_once_ranks_cannot_start_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_rank, "_HEALTH_SECONDS", 0.001)
    supervisor, begun = Supervisor(), asyncio.Event()
    ranks = TargetRanks(None, supervisor)  # type: ignore[arg-type]

    async def wait_for_ever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            begun.clear()

    assert await ranks.guarded(asyncio.sleep(0.01, "done")) == "done"
    waiting = asyncio.create_task(ranks.guarded(wait_for_ever()))
    await begun.wait()
    supervisor.is_lost = True
    with pytest.raises(TargetUnavailable, match="the last 3 starts of the ranks failed"):
        await waiting
    assert not begun.is_set()  # the work was cancelled


def configured(command: Command, **changes: object) -> Configuration:
    named = {"target.path": str(command.target), "target.device": "cpu"}
    return load_configuration({}, named | {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target__tensor_parallel": 5}, r"target\.tensor_parallel: needed a divisor of 2 key-value heads"),
        ({"target__tensor_parallel": 2, "target__span_nodes": True}, r"target\.span_nodes: true is refused"),
        ({"target__tensor_parallel": 2, "target__kv__pool_bytes": 1 << 50}, "memory of this machine: needed"),
    ],
)
def test_ranks_that_cannot_be_are_refused_before_ray_starts(
    changes: dict[str, object], message: str, command: Command
) -> None:
    async def start() -> None:
        async with target_ranks(configured(command, **changes)):
            pass

    with pytest.raises(ConfigurationError, match=message):
        asyncio.run(start())
    assert not ray.is_initialized()


class Ranks:
    """Two processes that end a moment after they are asked to, as those of Ray do. They are `RankActors`."""

    started: ClassVar[list[Popen[bytes]]] = []

    def __init__(self, *_: object) -> None:
        self._own = [Popen(["sleep", "60"]) for _ in range(2)]

    async def start(self) -> str:
        self.started.extend(self._own)
        return "127.0.0.1:1"

    async def ended(self) -> str:
        await asyncio.Event().wait()
        return "never"

    async def stop(self) -> None:
        for one in self._own:
            Timer(0.1, one.kill).start()

    def process_ids(self) -> list[int]:
        return [one.pid for one in self._own]


async def test_processes_and_placement_of_ranks_are_gone_before_others_start(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes and placement group are gone, also where closing the connection fails."""
    states = iter(["CREATED", "REMOVED"])

    class Unclosed(GrpcTarget):
        async def close(self) -> None:
            await super().close()
            raise OSError("the connection was not closed")

    done: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    for name, value in {
        "placement_group": lambda *_: None,
        "remove_placement_group": lambda _: done.append("remove"),
        "placement_group_table": lambda _: {"state": next(states)},
        "RankActors": Ranks,
        "GrpcTarget": Unclosed,
    }.items():
        monkeypatch.setattr(target_ranks_module, name, value)

    with pytest.raises(OSError, match="the connection was not closed"):
        async with target_ranks(configured(command, target__tensor_parallel=2, target__kv__pool_bytes=1 << 20)):
            assert [one.poll() for one in Ranks.started] == [None, None]

    assert not any(psutil.pid_exists(one.pid) for one in Ranks.started)
    assert done == ["remove"] and next(states, None) is None
