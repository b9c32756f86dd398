"""Predicted times of any steps of a model, from a few that are counted with its first layers.

Layers of a kind launch the same kernels, so each further one adds what the one before it added. What attention takes
follows from the rows of a step, by the functions that count it. All else follows from the number of tokens: it is
interpolated between counted steps. A step that runs in a CUDA graph has as many tokens as the graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cluster.core.tree import EMPTY_TREE
from deploy.roofline import DECODING
from deploy.simulation.device.attention import NARROW, WIDE, LayerAttention, attention_kernels
from deploy.simulation.device.fake_device import Kernel
from deploy.simulation.device.models import RankModel
from deploy.simulation.device.prediction import achieved_of, kernel_seconds, predict
from deploy.simulation.device.speeds import H100, OTHERS, Device
from deploy.simulation.device.step import Rows, StepCount, count_step
from workers.forward.graph_sizes import LONGEST, LONGEST_OF_FEW, WORD, packed_graph_sizes, smallest_graph
from workers.forward.layout import RowShape

TOKENS = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Tokens of the steps that are counted. Longer steps take what the last two say of a token. Up to about 64, each token
chooses experts that others did not; from about 256 on, products take longer to compute than weights to read."""
_STORED = 512
_MOST_ROWS = 64
"""Sequences of a counted step; in larger ones each has a draft, or one of them has a prompt."""
_BLOCK_SIZE = 16
_GRAPHS = packed_graph_sizes(LONGEST // _BLOCK_SIZE, LONGEST_OF_FEW // _BLOCK_SIZE)


@dataclass(frozen=True, slots=True)
class _Counted:
    """What is known of a model with some of its layers."""

    seconds: tuple[float, ...]
    """Times of the counted steps without attention and without what follows from the longest row."""
    attention: Counter[LayerAttention]
    """How many layers attend so."""
    recurrent: int
    """Layers that compute the tokens of a row one after another."""

    def further(self, other: _Counted, times: int) -> _Counted:
        """This count with its difference to `other`, a deeper model, added `times` times."""
        added = Counter({of: times * (count - self.attention[of]) for of, count in other.attention.items()})
        return _Counted(
            tuple(one + times * (two - one) for one, two in zip(self.seconds, other.seconds, strict=True)),
            self.attention + added,
            self.recurrent + times * (other.recurrent - self.recurrent),
        )


class PredictedSteps:
    """How long steps of a model take on a GPU: a prediction for each rank."""

    def __init__(
        self,
        model: RankModel,
        device: Device = H100,
        *,
        symmetric_memory: bool = False,
        report: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Counts steps of `TOKENS`, which takes seconds. `report` receives the share that is done.

        With `symmetric_memory`, ranks sum as with `target.symmetric_memory: on`.
        """
        self._model, self._device, self._symmetric_memory = model, device, symmetric_memory
        depths = counted_layers(model)
        self._done, self._all, self._report = 0, len(depths) * len(TOKENS), report
        found = [self._count(layers) for layers in depths]
        self._counted = found[0]
        if len(found) > 1:
            times = (model.all_layers - depths[0]) // (depths[1] - depths[0])
            self._counted = found[0].further(found[1], times)

    def seconds(self, rows: Sequence[tuple[int, int]]) -> float:
        """The time of a step of rows, each with its stored tokens and those that are computed."""
        shapes = [RowShape((), stored, width, EMPTY_TREE) for stored, width in rows]
        return (
            _interpolated(_computed_tokens(shapes), self._counted.seconds)
            + self._attention_seconds(shapes)
            + self._counted.recurrent * max(shape.width for shape in shapes) * OTHERS.step_seconds
        )

    def _attention_seconds(self, rows: Sequence[RowShape]) -> float:
        return sum(
            count * sum(self._launched(kernel) for kernel in attention_kernels(rows, of))
            for of, count in self._counted.attention.items()
        )

    def _launched(self, kernel: Kernel) -> float:
        return kernel_seconds(kernel, self._device) + self._device.graph_launch_seconds

    def _count(self, layers: int) -> _Counted:
        model = replace(self._model, layers=layers)
        steps = list[StepCount]()
        for tokens in TOKENS:
            steps.append(count_step(model, _rows_of(tokens)))
            self._done += 1
            self._report(self._done / self._all)
        recurrent = sum(bool(kernel.steps) and not _attends(kernel) for kernel in steps[0].sequence)
        return _Counted(tuple(map(self._without_rows, steps)), Counter(steps[0].attention), recurrent)

    def _without_rows(self, step: StepCount) -> float:
        """The predicted time of a step without what follows from its rows."""
        seconds = predict(step, self._device, symmetric_memory=self._symmetric_memory).seconds
        attention = sum(self._launched(kernel) for kernel in step.sequence if _attends(kernel))
        recurrent = sum(
            kernel.steps * achieved_of(kernel.name).step_seconds for kernel in step.sequence if not _attends(kernel)
        )
        return seconds - attention - recurrent


def counted_layers(model: RankModel) -> tuple[int, ...]:
    """Numbers of first layers to count: two that differ by as many as repeat, or all of a model that has few."""
    few = model.first_layers + max(2, model.period)
    few += (model.all_layers - few) % model.period
    more = few + model.period
    return (few, more) if more < model.all_layers else (model.all_layers,)


def _rows_of(tokens: int) -> tuple[Rows, ...]:
    """A step of so many tokens: sequences that decode, with drafts if there are many, or a prompt beside others."""
    if tokens <= _MOST_ROWS:
        return (Rows(tokens, _STORED),)
    if tokens <= 8 * _MOST_ROWS:
        return (Rows(_MOST_ROWS, _STORED, nodes=tokens // _MOST_ROWS - 1),)
    return (Rows(DECODING, _STORED), Rows(1, 0, fresh=tokens - DECODING))


def _computed_tokens(rows: Sequence[RowShape]) -> int:
    """The tokens that a step of these rows computes: those that pad its CUDA graph too, if it runs in one."""
    selected = sum(row.width if row.width <= WORD else 1 for row in rows)
    size = smallest_graph(_GRAPHS, rows, selected, _BLOCK_SIZE)
    return sum(row.width for row in rows) if size is None else size.tokens


def _attends(kernel: Kernel) -> bool:
    return kernel.name in (NARROW, WIDE)


def _interpolated(tokens: int, seconds: Sequence[float]) -> float:
    """The time between two counted steps, or beyond the last two, on a line."""
    above = min(max(1, bisect_right(TOKENS, tokens)), len(TOKENS) - 1)
    share = (tokens - TOKENS[above - 1]) / (TOKENS[above] - TOKENS[above - 1])
    return seconds[above - 1] + share * (seconds[above] - seconds[above - 1])
