"""Compares the rate of two `pilotfish serve` clusters with default settings, plain and drafted.

Both start once and keep running. They answer the same prompts in turn, plain then drafted, then drafted then plain, so
that only one of them computes at a time. Every pair has other prompts. The result is the ratio of the two rates.

With `--against DIRECTORY`, the first cluster runs the code of another checkout with the same drafting method, so that
the ratio says what the commits between the two cost or bring.
"""

from __future__ import annotations

import asyncio
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field

from tests.bench.client import Answers, ask_all
from tests.bench.drafting import SHIPPED
from tests.bench.options import Options
from tests.bench.processes.serve_command import ServeCommand
from tests.bench.report import heading, ratios, spread, table, write

BATCHES, QUICK_BATCHES = (4, 8, 16), (4,)
PLAIN = "none"
METHODS = ("model",)
"""Drafting methods that are compared with plain decoding, unless `--variants` names others. `suffix+recycling` means
both in one tree. `none` compares two plain clusters, which shows what the order of their starts is worth."""
DTYPE = "bfloat16"
ANSWERS, LEAST_TURNS, MOST_TURNS = 128, 2, 8
"""Answers of a measurement, and the bounds of how many one request slot gives: few slots give more, because a second
alone says little."""
LEAST_RATIO = 0.97
"""Drafted serving should reach this share of plain serving's rate at every batch size."""


def turns(batch: int) -> int:
    """Prompts of a measurement, for each request in flight."""
    return max(LEAST_TURNS, min(MOST_TURNS, ANSWERS // batch))


@dataclass
class Pairs:
    """The measurements of one drafting method at one batch size: one of the base and one of the compared per pair."""

    base: list[Answers] = field(default_factory=list)
    compared: list[Answers] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Rate of the compared cluster ÷ rate of the base, per pair."""
        return ratios([answers.rate for answers in self.compared], [answers.rate for answers in self.base])

    @property
    def equal(self) -> int:
        """Number of answers that are the same in both clusters."""
        return sum(
            one.tokens == other.tokens
            for base, compared in zip(self.base, self.compared, strict=True)
            for one, other in zip(base.each, compared.each, strict=True)
        )


def run(options: Options) -> None:
    """Measure and report, one drafting method after another."""
    base = "pilotfish serve without" if options.against is None else "that of another checkout"
    heading(f"Serving in pairs: pilotfish serve with drafts against {base}")
    prompts = f"{LEAST_TURNS} to {MOST_TURNS} prompts per request in flight, {options.tokens} tokens each"
    write(f"{options.repeats} pairs; {prompts}; {DTYPE}")
    for method in options.variants or METHODS:
        _compare(options, method)


def assignments(options: Options, method: str) -> list[str]:
    """The settings of one cluster: defaults except for the dtype, the drafting method and the draft model."""
    methods = f"draft.methods=[{method.replace('+', ',')}]" if "+" in method else f"draft.method={method}"
    chosen = [f"target.dtype={DTYPE}", methods]
    if method == "model":
        chosen += [f"draft.model.path={options.draft or SHIPPED}", f"draft.model.dtype={DTYPE}"]
    return [*chosen, *options.assignments]


def _compare(options: Options, method: str) -> None:
    batches = options.batches or (QUICK_BATCHES if options.quick else BATCHES)
    found = {batch: Pairs() for batch in batches}
    with ExitStack() as stack:
        base, compared = (stack.enter_context(command) for command in _commands(options, method))
        prompts = PairPrompts(options, batches)
        for batch in batches:  # both sides run every batch size once, and the controller measures the gain of drafts
            for cluster in (base, compared):
                asyncio.run(ask_all(cluster.grpc_address, prompts.warm_up(batch), options.tokens, batch))
        for pair in range(options.repeats):
            for batch in batches:
                chosen = prompts.of_pair(pair, batch)
                for cluster in (base, compared) if pair % 2 == 0 else (compared, base):
                    answers = asyncio.run(ask_all(cluster.grpc_address, chosen, options.tokens, batch))
                    (found[batch].base if cluster is base else found[batch].compared).append(answers)
                write(f"pair {pair + 1}, {method}, batch {batch}: {found[batch].ratios[-1]:.3f}")
    _report(method, found, "plain" if options.against is None else "other checkout")


def _commands(options: Options, method: str) -> tuple[ServeCommand, ServeCommand]:
    """The base and the compared cluster."""
    compared = ServeCommand(options.config, assignments(options, method))
    if options.against is None:
        return ServeCommand(options.config, assignments(options, PLAIN)), compared
    return ServeCommand(options.config, assignments(options, method), checkout=options.against), compared


class PairPrompts:
    """Prompts by pair and batch size. None is used twice while there are enough."""

    def __init__(self, options: Options, batches: tuple[int, ...]) -> None:
        self._batches = batches
        self._per_pair = sum(turns(batch) * batch for batch in batches)
        self._prompts = options.prompts(self._per_pair * (options.repeats + 1))

    def warm_up(self, batch: int) -> list[tuple[int, ...]]:
        """Prompts that no pair uses."""
        return self.of_pair(-1, batch)

    def of_pair(self, pair: int, batch: int) -> list[tuple[int, ...]]:
        """The prompts of one measurement."""
        before = sum(turns(other) * other for other in self._batches[: self._batches.index(batch)])
        first = (pair + 1) * self._per_pair + before
        return [self._prompts[index % len(self._prompts)] for index in range(first, first + turns(batch) * batch)]


def _report(method: str, found: dict[int, Pairs], base: str) -> None:
    rows = []
    for batch, pairs in found.items():
        middle = statistics.median(pairs.ratios)
        rows.append(
            [
                method,
                str(batch),
                spread([answers.rate for answers in pairs.base], 1),
                spread([answers.rate for answers in pairs.compared], 1),
                spread(pairs.ratios, 3),
                spread([answers.committed_per_step for answers in pairs.compared]),
                f"{pairs.equal} of {sum(len(answers.each) for answers in pairs.base)}",
                "yes" if middle >= LEAST_RATIO else "NO",
            ]
        )
    columns = ("drafts", "batch", f"{base}, tokens/s", "tokens/s", f"÷ {base}", "tokens per step", "equal answers")
    table((*columns, f"median ≥ {LEAST_RATIO}"), rows)
