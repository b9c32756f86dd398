"""A coordinator's rows come as an engine expects them, so steps are launched before. No token depends on it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.coordinator.coordinator import Coordinator
from cluster.coordinator.metrics import Metrics
from cluster.core.config.model_section import ModelSection
from cluster.core.config.sections import Configuration
from cluster.core.config.target_section import KvSection
from cluster.core.request import GenerationRequest
from cluster.core.verification import StepBatch
from tests.support.fakes.echo_workers import target_at
from tests.support.fakes.fake_cluster import TOO_LONG_SECONDS, all_tokens, first_commit_then_leave, request, tokens_of
from workers.draft.registry import create
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.serve.configuration import load_configuration
from workers.serve.target_servicer import TargetServicer
from workers.verify import ahead
from workers.verify.ahead import LaunchedStep
from workers.verify.decider import LocalDecider
from workers.verify.engine import EngineOptions, TargetEngine

TOKENS = 24


def configured(directory: Path, drafts: bool) -> Configuration:
    draft: dict[str, Any] = {"method": "none"}
    if drafts:
        draft = {"method": "ngram", "placement": "target", "controller": "off", "max_nodes": 4, "max_depth": 4}
    return load_configuration({"target": {"path": str(directory), "device": "cpu"}, "draft": draft})


def wanted() -> list[GenerationRequest]:
    """The second answer ends earlier than the others."""
    lengths = (TOKENS, TOKENS // 2, TOKENS)
    return [
        request(f"r{index}", (5, 17, 5, 17, 5, 20 + index), length, temperature=float(index == 2))
        for index, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
async def test_answers_are_the_same_and_steps_are_launched_before_their_rows_come(
    directory: Path, monkeypatch: pytest.MonkeyPatch, drafts: bool
) -> None:
    monkeypatch.setattr(ahead, "LEAST_SHARE", 0.0)
    configuration = configured(directory, drafts)
    taken: list[LaunchedStep | None] = []
    take = ahead.StepsAhead.take

    def counted(steps: ahead.StepsAhead, batch: StepBatch) -> LaunchedStep | None:
        taken.append(take(steps, batch))
        return taken[-1]

    monkeypatch.setattr(ahead.StepsAhead, "take", counted)
    found: list[list[list[int]]] = []
    for goes_ahead in (False, True):
        taken.clear()
        model = load_model(ModelSection(path=str(directory), device="cpu"))
        pool = KvPool(model.kv_spec, KvSection(block_size=4), blocks=200)
        method = create(configuration.draft, configuration.target) if drafts else None
        engine = TargetEngine(model, pool, LocalDecider(), EngineOptions(method=method, goes_ahead=goes_ahead))
        async with (
            asyncio.timeout(TOO_LONG_SECONDS),
            target_at(TargetServicer(engine)) as target,
            Coordinator(target, [], configuration, Metrics()) as coordinator,
        ):
            together = asyncio.create_task(all_tokens(coordinator, wanted()))
            await first_commit_then_leave(coordinator, request("leaves", (9, 9, 9), TOKENS))
            found.append(await together)
            found[-1].append(await tokens_of(coordinator, request("alone", (5, 17, 5, 17), TOKENS)))
        share = sum(one is not None for one in taken) / len(taken)
        assert (share > 0.0) == goes_ahead  # how many follows from the load of the machine as well
        assert pool.blocks_free == pool.blocks_total
    assert found[0] == found[1]
    assert [len(one) for one in found[0]] == [TOKENS, TOKENS // 2, TOKENS, TOKENS]
