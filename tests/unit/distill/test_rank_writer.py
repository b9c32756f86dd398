"""How ranks are asked for texts, and which of their hidden states are those of other ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.core.errors import ConfigurationError, ModelLoadError
from deploy.distillation import rank_writer, target_ranks
from deploy.distillation.conversations import WritingPlan
from deploy.distillation.execute import execute
from deploy.distillation.rank_writer import RankWriter
from pilotfish.v1 import generation_pb2
from workers.serve.configuration import load_configuration


def writer(max_length: int = 40, **changes: object) -> RankWriter:
    named = {"path": "target", "tensor_parallel": 2} | {key.replace("__", "."): value for key, value in changes.items()}
    configuration = load_configuration({}, {f"target.{name}": value for name, value in named.items()})
    return RankWriter(configuration, lambda _: None, max_length)


def test_settings_that_change_hidden_states_have_a_name() -> None:
    given: list[dict[str, Any]] = [
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"kv__dtype": "int8"},
        {"kv__window": 64},
        {"kv__window": 64, "kv__sinks": 8},
    ]
    names = [writer(**changes).settings for changes in given]
    assert all(names) and len(set(names)) == len(names)
    assert names == [writer(**changes).settings for changes in given]


@pytest.mark.parametrize("changes", [{}, {"dtype": "float32"}, {"kv__sinks": 8}, {"kv__pool_bytes": 1 << 30}])
def test_settings_that_change_no_hidden_state_have_none(changes: dict[str, Any]) -> None:
    assert not writer(**changes).settings


class Run:
    """A training that only notes where its hidden states are. It is a `SingleProcess`."""

    found: Path
    directory_of_training = None

    def __init__(self, chosen: argparse.Namespace, _: object) -> None:
        self._chosen = chosen

    def run(self) -> None:
        Run.found = self._chosen.states

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


@pytest.mark.parametrize("workers", [1, 2])
def test_states_of_other_settings_are_in_another_folder(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that train look there, too."""
    trainers = SimpleNamespace(run_in_workers=lambda chosen, *_: setattr(Run, "found", chosen.states))
    monkeypatch.setitem(sys.modules, "deploy.distillation.ray_trainers", trainers)

    def folder(of: RankWriter) -> Path:
        chosen = argparse.Namespace(workers=workers, answers=tmp_path / "answers.jsonl", states=None, out=tmp_path)
        execute(Run, chosen, None, of)  # type: ignore[arg-type]
        return Run.found

    other = writer(dtype="bfloat16")
    assert folder(writer()) == tmp_path / "states"
    assert folder(other) == tmp_path / f"states-{other.settings}"


@pytest.mark.parametrize("begin", [RankWriter.writing, lambda one: one.reading((1, 2))])
def test_texts_that_may_be_longer_than_the_context_are_refused_before_one_is_written(
    begin: Callable[[RankWriter], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def ranks(*_: object) -> AsyncIterator[object]:
        yield SimpleNamespace(target=SimpleNamespace(info=info))

    async def info() -> object:
        return SimpleNamespace(max_context_len=39)

    monkeypatch.setattr(target_ranks, "target_ranks", ranks)
    monkeypatch.setattr(rank_writer, "LocalCluster", None)  # starting one would be another error
    message = "--max-length: 40 is refused; the target reads texts of 39 tokens at most"
    with writer() as one, pytest.raises(ConfigurationError, match=message):
        begin(one)


def test_a_target_whose_configuration_cannot_be_read_is_refused_by_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": "abc"}')

    @asynccontextmanager
    async def ranks(*_: object) -> AsyncIterator[object]:
        yield SimpleNamespace(target=SimpleNamespace(info=info))

    async def info() -> object:
        return SimpleNamespace(max_context_len=40)

    monkeypatch.setattr(target_ranks, "target_ranks", ranks)
    with (
        writer(path=str(tmp_path)) as one,
        pytest.raises(ModelLoadError, match=f"'{tmp_path}': its configuration cannot be read"),
    ):
        one.reading((1, 2))


class Client:
    """Answers with as many tokens as are asked for. It is a `GenerationClient`."""

    async def generate(
        self, request: generation_pb2.GenerateRequest, _: float
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        tokens = [5] * request.stopping.max_tokens
        yield generation_pb2.GenerateResponse(delta=generation_pb2.GenerationDelta(token_ids=tokens))


async def test_no_text_longer_than_the_target_writes_is_asked_for() -> None:
    client: Any = Client()
    api = rank_writer._Api(client, context=64, most_tokens=6, sequences=2, timeout_seconds=1.0)
    for wanted, expected in ((4, 4), (6, 6), (100, 6)):
        assert await api.continuations([(1,), (1,) * 64], [0.0] * 2, WritingPlan(wanted, (), 0)) == [
            (5,) * expected,
            (),
        ]
