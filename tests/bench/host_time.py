"""A target's step on a GPU without its device: what the host plans, decides and commits. Nothing is computed.

Launches, copies to the device and the wait for it are not in it. Every decision is the token 0, so of a chain of
drafted tokens those before the first other one are accepted.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.ids import SequenceId
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import StepBatch, StepResult, VerifyRow
from cluster.wire.codec.step import decode_step_batch, decode_step_result, encode_step_batch, encode_step_result
from tests.bench.random_model import Shape
from workers import transfer
from workers.forward import cuda_graphs
from workers.forward.backends.choice import ChosenBackend
from workers.forward.backends.triton import CAPABILITIES, TritonBackend
from workers.forward.loaded_model import PassOutput
from workers.forward.runner import ModelRunner, attention_setting
from workers.kv.pool import KvPool
from workers.model.loading import load_model
from workers.sampling import decide
from workers.transfer import HostArray, to_host_together
from workers.verify.decider import LocalDecider
from workers.verify.engine import EngineOptions, TargetEngine

VOCABULARY, BLOCK, CHUNK = 256, 16, 2048
SAMPLINGS = {
    "greedy": SamplingParameters(temperature=0.0),
    "drawn": SamplingParameters(temperature=0.7, top_p=0.95, seed=7),
    "penalties": SamplingParameters(temperature=0.7, seed=7, repetition_penalty=1.1),
}
"""Parameters that all rows have."""
PARTS = {
    "whole": "whole step",
    "before": "before the pass is launched",
    "after": "after the decisions have arrived",
    "plan": "planning the pass",
    "table": "the decisions' parameters",
    "wire": "the step's messages, encoded and decoded",
}
Microseconds = dict[str, float]
"""Microseconds of a row, by part. The messages are not in the whole. A GPU has nothing to do before and after."""


class _Planning(TritonBackend):
    """The Triton backend, which plans without the package `triton`."""

    def __init__(self, setting: Any) -> None:
        self._bind(setting)


class _OnGpu(LocalDecider):
    def largest(self, logits: torch.Tensor) -> list[int] | None:
        return None


class _Clock:
    """Sums the time of a function's calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        begun = time.thread_time()
        try:
            return self._function(*arguments, **keywords)
        finally:
            self.seconds += time.thread_time() - begun


class _Gpu:
    """Stands for a GPU: each pass takes the same time, and computes nothing."""

    def __init__(self, pass_seconds: float) -> None:
        self._pass_seconds = pass_seconds
        self._ends = 0.0
        self.launched = self.arrived = 0.0
        """When the last pass was launched, and when its decisions had arrived, in CPU seconds of the thread."""

    def launch(self) -> None:
        self.launched = time.thread_time()
        self._ends = max(self._ends, time.perf_counter()) + self._pass_seconds

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture a pass, whose replay launches it."""
        function()
        return self.launch

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[HostArray]:
        """Wait for all passes."""
        if (left := self._ends - time.perf_counter()) > 0.0:
            time.sleep(left)
        found = to_host_together(tensors)
        self.arrived = time.thread_time()
        return found


class HostSteps:
    """An engine whose sequences all take part in every step."""

    def __init__(self, engine: TargetEngine, plan: _Clock, table: _Clock, gpu: _Gpu) -> None:
        self.engine = engine
        self._plan, self._table, self._gpu = plan, table, gpu
        self._tokens: dict[SequenceId, list[int]] = {}

    def add(self, count: int, stored: int, sampling: SamplingParameters) -> None:
        """Begin so many sequences, of `stored` tokens each."""
        for index in range(count):
            sequence_id = SequenceId(f"s{index}")
            tokens = [1 + (index + place) % (VOCABULARY - 1) for place in range(stored)]
            start = SequenceStart(stored, replace(sampling, seed=index))
            for first in range(0, stored, CHUNK):
                end = min(stored, first + CHUNK)
                row = VerifyRow(sequence_id, end, tuple(tokens[first:end]), start=None if first else start)
                self._step((replace(row, decide=end == stored),))
            self._tokens[sequence_id] = [*tokens, 0]

    def step(self, tree: TokenTree) -> Microseconds:
        """Verify this draft of every sequence."""
        rows = tuple(
            VerifyRow(sequence_id, len(tokens), (tokens[-1],), tree) for sequence_id, tokens in self._tokens.items()
        )
        self._plan.seconds = self._table.seconds = 0.0
        begun = time.thread_time()
        result = self._step(rows)
        ended = time.thread_time()
        spent = {
            "whole": ended - begun,
            "before": self._gpu.launched - begun,
            "after": ended - self._gpu.arrived,
            "plan": self._plan.seconds,
            "table": self._table.seconds,
            "wire": _exchanged(rows, result),
        }
        for verdict in result.verdicts:
            self._tokens[verdict.sequence_id].extend(verdict.tokens)
        return {part: 1e6 * seconds / len(rows) for part, seconds in spent.items()}

    def clear(self) -> None:
        """Release every sequence."""
        self._tokens.clear()
        self.engine.release_all()

    def _step(self, rows: tuple[VerifyRow, ...]) -> StepResult:
        result = self.engine.step(StepBatch(rows))
        for verdict in result.verdicts:
            if verdict.fault is not None:
                raise RuntimeError(f"{verdict.sequence_id}: {verdict.fault}")
        return result


def _exchanged(rows: tuple[VerifyRow, ...], result: StepResult) -> float:
    """Seconds to encode and decode both messages of a step."""
    begun = time.thread_time()
    sent = encode_step_batch(StepBatch(rows)).SerializeToString()
    decode_step_batch(encode_step_batch(StepBatch(())).FromString(sent))
    answer = encode_step_result(result)
    decode_step_result(answer.FromString(answer.SerializeToString()))
    return time.thread_time() - begun


def median_steps(steps: HostSteps, tree: TokenTree, count: int) -> Microseconds:
    """The median of the parts of `count` steps, after two other ones."""
    found = [steps.step(tree) for _ in range(2 + count)][2:]
    return {part: statistics.median(one[part] for one in found) for part in PARTS}


def draft(nodes: int) -> TokenTree:
    """A chain of which the first half is accepted."""
    return TokenTree.chain([0] * (nodes // 2) + [1] * (nodes - nodes // 2)) if nodes else EMPTY_TREE


@contextmanager
def host_steps(tokens: int, *, pass_seconds: float = 0.0, goes_ahead: bool = False) -> Iterator[HostSteps]:
    """An engine with room for so many tokens of all sequences, and CUDA graphs that compute nothing for some time."""

    def compute(_: ModelRunner, tokens: object, positions: object, selected: torch.Tensor, *__: object) -> PassOutput:
        return PassOutput(torch.zeros(len(selected), VOCABULARY).index_fill_(1, torch.tensor([0]), 1.0))

    def winners(_: object, logits: torch.Tensor, *__: object) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(len(logits)), torch.zeros(len(logits), dtype=torch.int64)

    plan, table, gpu = _Clock(TritonBackend.plan_packed), _Clock(decide.table_of), _Gpu(pass_seconds)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
        Shape(64, 64, 2, 2, 1, VOCABULARY, head=32).write(directory)
        replaced: list[tuple[Any, str, Any]] = [
            (cuda_graphs, "CudaGraphCapture", lambda _: gpu.capture),
            (transfer, "to_host_together", gpu.copy),
            (ModelRunner, "_compute", compute),
            (_Planning, "plan_packed", lambda *arguments: plan(*arguments)),
            (decide, "kernels_for", lambda _: SimpleNamespace()),
            (decide, "winners", winners),
            (decide, "largest", lambda _: None),
            (decide, "table_of", table),
        ]
        for owner, name, value in replaced:
            stack.enter_context(patch.object(owner, name, value))
        section = ModelSection(path=str(directory), device="cpu", native="off", load_format="dummy", compile="off")
        model = replace(load_model(section), uses_cuda_graphs=True)
        pool = KvPool(model.kv_spec, KvSection(block_size=BLOCK), -(-tokens // BLOCK))
        chosen = ChosenBackend("triton", _Planning(attention_setting(model, pool)), CAPABILITIES)
        engine = TargetEngine(model, pool, _OnGpu(), EngineOptions(attention=chosen, goes_ahead=goes_ahead))
        graphs = engine._runner.graphs
        if graphs is None:
            raise RuntimeError("the stand-in for a GPU has no CUDA graphs")
        graphs.warm_up()
        yield HostSteps(engine, plan, table, gpu)
        engine.close()
