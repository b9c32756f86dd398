"""The memory that CUDA graphs take is compared with what was reserved for them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from tests.support.models import tiny
from workers.forward import runner as runners
from workers.forward.captured_passes import allocated_bytes
from workers.forward.runner import ModelRunner
from workers.kv.pool import KvPool
from workers.model.loading import load_model

BEFORE = 5000


class Graphs:
    """Stands for CUDA graphs: they take so many bytes when they are captured."""

    def __init__(self, taken: int) -> None:
        self.held = BEFORE
        self._taken = taken

    def warm_up(self, _: object) -> None:
        self.held += self._taken

    def run(self, *_: object) -> None:
        """No step has a graph."""


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_graphs_that_take_more_than_was_reserved_are_warned_of_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, excess: int
) -> None:
    model = load_model(
        ModelSection(path=str(tiny.save(tmp_path, tiny.llama())), device="cpu", compile="off", native="off")
    )
    graphs = Graphs(model.graph_bytes + excess)
    monkeypatch.setattr(runners, "make_graph_runner", lambda *_: graphs)
    monkeypatch.setattr(runners, "allocated_bytes", lambda _: graphs.held)
    runner = ModelRunner(model, KvPool(model.kv_spec, KvSection(block_size=4), 100))
    with caplog.at_level(logging.INFO, "workers.forward.captured_passes"):
        runner.warm_up()
    (said,) = [one for one in caplog.records if "reserved" in one.getMessage()]
    assert (said.levelno == logging.WARNING) is (excess > 0)
    assert f"{model.graph_bytes + excess} bytes" in said.getMessage()
    assert f"{model.graph_bytes} bytes were reserved" in said.getMessage()


def test_a_cpu_has_no_memory_of_graphs() -> None:
    assert allocated_bytes(torch.device("cpu")) == 0
