"""Gemma 3 270M: five of six layers attend to the last 512 tokens only.

The text equals that of `transformers` beyond the window, and blocks outside the window are freed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.core.config.target_section import TargetSection
from cluster.core.errors import ModelLoadError
from cluster.core.kv import KvGroup, KvLayout
from cluster.core.ports import DraftMethod
from cluster.core.verification import StepBatch, StepResult
from deploy.local import local_cluster
from deploy.settings import load_settings
from tests.support.clusters.live_cluster import Reference, RequestCase, Server, tokens_grpc
from workers.model.model_files import resolve_model_directory
from workers.serve.configuration import load_configuration
from workers.verify.build import build_engine
from workers.verify.engine import TargetEngine

pytestmark = pytest.mark.weights

WINDOW = 512
STEP_TOKENS = 256
TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def gemma_directory() -> Path:
    """The base model, converted from its package."""
    try:
        return resolve_model_directory("gemma-3-270m", load_settings().cache_directory)
    except ModelLoadError as error:
        pytest.fail(f"run `make test`, which installs it: {error}")


@pytest.fixture(scope="module")
def expected(gemma_directory: Path) -> dict[RequestCase, tuple[int, ...]]:
    """The answers of `transformers`: one crosses the edge of the window, one begins far beyond it."""
    torch.set_num_threads(2)
    reference = Reference(gemma_directory)
    text = reference.plain(TEXT.read_text(encoding="utf-8"))
    requests = [RequestCase(text[: WINDOW - 16], 32), RequestCase(text[200 : WINDOW + 448], 20)]
    return {request: reference.greedy(request.prompt, request.max_tokens) for request in requests}


class RecordedEngine:
    """Records how many blocks are in use after every step of an engine."""

    def __init__(self, engine: TargetEngine) -> None:
        self.layout: KvLayout = engine.info().layout
        self.in_use: list[int] = []
        self.accepted = 0
        self._step = engine.step

    def step(self, batch: StepBatch) -> StepResult:
        result = self._step(batch)
        self.in_use.append(result.kv.blocks_total - result.kv.blocks_free)
        self.accepted += sum(max(0, len(verdict.tokens) - 1) for verdict in result.verdicts)
        return result


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[RecordedEngine]:
    """The engines that the test builds."""
    engines: list[RecordedEngine] = []

    def build(section: TargetSection, method: DraftMethod | None = None) -> TargetEngine:
        engine = build_engine(section, method=method)
        engines.append(RecordedEngine(engine))
        monkeypatch.setattr(engine, "step", engines[-1].step)
        return engine

    monkeypatch.setattr(local_cluster, "build_engine", build)
    return engines


@pytest.mark.parametrize("method", ["none", "ngram"])
async def test_text_beyond_the_window_is_the_same_and_blocks_outside_it_are_freed(
    method: str, gemma_directory: Path, expected: dict[RequestCase, tuple[int, ...]], recorded: list[RecordedEngine]
) -> None:
    configuration = load_configuration(
        {
            "target": {"path": str(gemma_directory), "device": "cpu", "kv": {"pool_bytes": 128 << 20}},
            "draft": {"method": method, "max_nodes": 6, "max_depth": 6, "timeout_seconds": 60.0, "controller": "off"},
            "scheduler": {"max_sequences": 2, "max_step_tokens": STEP_TOKENS},
            "server": {"grpc_port": 0, "http_port": 0},
        }
    )
    async with local_cluster.LocalCluster(configuration) as cluster:
        for request, answer in expected.items():
            assert await tokens_grpc(Server(cluster.grpc_address, ""), request) == answer
    (engine,) = recorded
    assert set(engine.layout.groups) == {KvGroup(tables=1), KvGroup(tables=5, window=WINDOW)}
    last = max(expected, key=lambda request: len(request.prompt))
    length = len(last.prompt) + last.max_tokens
    assert engine.in_use[-1] <= engine.layout.held(length)
    assert max(engine.in_use) <= engine.layout.peak(length, STEP_TOKENS)
    assert engine.in_use[-1] < 0.8 * KvLayout(engine.layout.block_size, (KvGroup(tables=6),)).held(length)
    assert (engine.accepted > 0) == (method == "ngram")
