"""Gemma 3 270M, whose layers see 512 tokens each, but for every sixth.

The text equals that of `transformers` past the window, and the blocks that fell out of it are free again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.core.config import TargetSection
from cluster.core.errors import ModelLoadError
from cluster.core.kv import KvGroup, KvLayout
from cluster.core.verification import StepBatch, StepResult
from deploy.local import local_cluster
from deploy.settings import load_settings
from tests.support.live_cluster import Reference, RequestCase, Server, tokens_grpc
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
    """The base model, as its package gives it."""
    try:
        return resolve_model_directory("gemma-3-270m", load_settings().cache_directory)
    except ModelLoadError as error:
        pytest.fail(f"run `make test`, which installs it: {error}")


@pytest.fixture(scope="module")
def expected(gemma_directory: Path) -> dict[RequestCase, tuple[int, ...]]:
    """What `transformers` writes: once across the window's edge while decoding, once far beyond it."""
    torch.set_num_threads(2)
    reference = Reference(gemma_directory)
    text = reference.plain(TEXT.read_text(encoding="utf-8"))
    asks = [RequestCase(text[: WINDOW - 16], 32), RequestCase(text[200 : WINDOW + 448], 20)]
    return {asked: reference.greedy(asked.prompt, asked.max_tokens) for asked in asks}


class Watched:
    """Notes how many blocks are in use after every step."""

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
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    """The engines that are built meanwhile."""
    engines: list[Watched] = []

    def build(section: TargetSection) -> TargetEngine:
        engine = build_engine(section)
        engines.append(Watched(engine))
        monkeypatch.setattr(engine, "step", engines[-1].step)
        return engine

    monkeypatch.setattr(local_cluster, "build_engine", build)
    return engines


@pytest.mark.parametrize("method", ["none", "ngram"])
async def test_the_text_is_the_same_past_the_window_and_what_fell_out_of_it_is_free(
    method: str, gemma_directory: Path, expected: dict[RequestCase, tuple[int, ...]], watched: list[Watched]
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
        for asked, answer in expected.items():
            assert await tokens_grpc(Server(cluster.grpc_address, ""), asked) == answer
    (engine,) = watched
    assert set(engine.layout.groups) == {KvGroup(tables=1), KvGroup(tables=5, window=WINDOW)}
    last = max(expected, key=lambda asked: len(asked.prompt))
    length = len(last.prompt) + last.max_tokens
    assert engine.in_use[-1] <= engine.layout.held(length)
    assert max(engine.in_use) <= engine.layout.peak(length, STEP_TOKENS)
    assert engine.in_use[-1] < 0.8 * KvLayout(engine.layout.block_size, (KvGroup(tables=6),)).held(length)
    assert (engine.accepted > 0) == (method == "ngram")
