"""The memory that CUDA graphs and activations take is compared with what was reserved for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.core.config.model_section import ModelSection, PoolSection
from cluster.core.config.target_section import KvSection
from cluster.core.errors import ConfigurationError
from tests.support.models import tiny
from workers.forward import runner as runners
from workers.forward.captured_passes import allocated_bytes, peak_from_now
from workers.forward.runner import ForwardRow, ModelRunner
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
@pytest.mark.parametrize(
    ("section", "setting"),
    [
        (KvSection(block_size=4), "target.kv.memory_fraction"),
        (KvSection(block_size=4, pool_bytes=1 << 20), "target.kv.pool_bytes"),
        (PoolSection(block_size=4), "draft.model.kv.memory_fraction"),
    ],
    ids=["target", "target with its size", "draft"],
)
def test_graphs_that_take_more_than_was_reserved_are_warned_of_with_both_numbers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    section: PoolSection,
    setting: str,
    excess: int,
) -> None:
    model = load_model(
        ModelSection(path=str(tiny.save(tmp_path, tiny.llama())), device="cpu", compile="off", native="off")
    )
    graphs, pool = Graphs(model.graph_bytes + excess), KvPool(model.kv_spec, section, 100)
    monkeypatch.setattr(runners, "make_graph_runner", lambda *_: graphs)
    monkeypatch.setattr(runners, "allocated_bytes", lambda _: graphs.held)
    runner = ModelRunner(model, pool)
    with caplog.at_level(logging.INFO, "workers.forward.captured_passes"):
        runner.warm_up()
    (said,) = [one for one in caplog.records if "reserved" in one.getMessage()]
    assert (said.levelno == logging.WARNING) is (excess > 0)
    assert f"{model.graph_bytes + excess} bytes" in said.getMessage()
    assert f"{model.graph_bytes} bytes were reserved" in said.getMessage()
    assert said.getMessage().endswith(f"; lower {setting}") is (excess > 0)


def test_what_is_kept_of_freed_tensors_does_not_hide_what_graphs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest step leaves much of it, and each capture gives it back."""
    kept = [1000]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: BEFORE + sum(kept))
    assert allocated_bytes(torch.device("cuda", 0)) == BEFORE


class Steps:
    """Stands for a GPU's memory: a step takes so many bytes of each token, of which there is room for `most`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, token_bytes: int, most: int = 1 << 20) -> None:
        self.widths: list[int] = []
        self._peak = 0
        forward = ModelRunner.forward

        def noted(runner: ModelRunner, rows: Sequence[ForwardRow], *options: Any) -> torch.Tensor:
            self.widths.append(sum(row.shape.width for row in rows))
            if self.widths[-1] > most:
                raise torch.OutOfMemoryError
            self._peak = max(self._peak, BEFORE + token_bytes * self.widths[-1])
            return forward(runner, rows, *options)

        monkeypatch.setattr(ModelRunner, "forward", noted)
        monkeypatch.setattr(runners, "peak_from_now", self.peak_from_now)

    def peak_from_now(self, _: object) -> Callable[[], int]:
        self._peak = BEFORE
        return lambda: self._peak


@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_activations_that_take_more_than_was_reserved_are_warned_of_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, excess: int
) -> None:
    """The largest step has more tokens than a sequence may have."""
    model = load_model(
        ModelSection(path=str(tiny.save(tmp_path, tiny.llama())), device="cpu", compile="off", native="off")
    )
    steps, largest = Steps(monkeypatch, model.layer_bytes + excess), model.max_context_len + 44
    pool = KvPool(model.kv_spec, KvSection(block_size=4, step_tokens=largest), 100)
    with caplog.at_level(logging.INFO, "workers.forward.captured_passes"):
        ModelRunner(model, pool).warm_up()
    (said,) = [one for one in caplog.records if "reserved" in one.getMessage()]
    assert (said.levelno == logging.WARNING) is (excess > 0)
    assert f"a step of {largest} tokens took {largest * (model.layer_bytes + excess)} bytes" in said.getMessage()
    assert f"{largest * model.layer_bytes} bytes were reserved" in said.getMessage()
    assert steps.widths[-1] == largest
    assert pool.blocks_free == pool.blocks_total


def test_a_gpu_without_memory_for_the_largest_step_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(
        ModelSection(path=str(tiny.save(tmp_path, tiny.llama())), device="cpu", compile="off", native="off")
    )
    Steps(monkeypatch, model.layer_bytes, most=99)
    pool = KvPool(model.kv_spec, KvSection(block_size=4, step_tokens=100), 100)
    said = r"target\.kv\.memory_fraction: 0\.1 is refused: the activations of a step of 100 tokens"
    with pytest.raises(ConfigurationError, match=said) as refused:
        ModelRunner(model, pool).warm_up()
    assert f"{100 * model.layer_bytes} bytes were reserved" in str(refused.value)
    assert pool.blocks_free == pool.blocks_total


def test_a_pool_without_room_for_the_largest_step_says_nothing_of_its_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(
        ModelSection(path=str(tiny.save(tmp_path, tiny.llama())), device="cpu", compile="off", native="off")
    )
    steps, pool = Steps(monkeypatch, 1), KvPool(model.kv_spec, KvSection(block_size=4, step_tokens=100), 20)
    with caplog.at_level(logging.INFO, "workers.forward.captured_passes"):
        ModelRunner(model, pool).warm_up()
    assert steps.widths
    assert max(steps.widths) < 100
    assert not caplog.records
    assert pool.blocks_free == pool.blocks_total


def test_a_cpu_has_no_memory_of_graphs_and_no_peak() -> None:
    assert allocated_bytes(torch.device("cpu")) == 0
    assert peak_from_now(torch.device("cpu")) is None
