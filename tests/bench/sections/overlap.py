"""Run-ahead drafting against serial drafting, measured in turn in the same run.

The first part uses a draft model, with drafter and target on one core each. The second part uses synthetic acceptance:
the acceptance rate and the cost of a drafted token are set, and theoretical speedups are shown beside measured ones.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack

from cluster.core.config.sections import Configuration
from deploy.implied_settings import NOT_LOSSLESS
from tests.bench import drafting, theory
from tests.bench.client import RequestOptions
from tests.bench.drafting import Passes, TaskPrompts
from tests.bench.options import Options
from tests.bench.processes import clusters
from tests.bench.processes.clusters import ProcessCluster
from tests.bench.report import heading, ratios, spread, table, write

MODES = ("serial", "run_ahead", "enumerate")
BATCHES = (1, 8)
ACCEPTANCES, QUICK_ACCEPTANCES = (0.6, 0.8, 0.9), (0.8,)
COSTS, QUICK_COSTS = (0.05, 0.1, 0.3), (0.1,)
"""Time to draft one token, in units of a plain round of the target."""
LENGTH = 4
"""Drafted tokens in each synthetic proposal."""
SYNTHETIC_PROMPTS = 6
PLAIN, DRAFTED = RequestOptions(max_draft_tokens=0), RequestOptions()
ALTERNATE = "enumerate, alternating halves"


def run(options: Options) -> None:
    """Measure and report."""
    heading("Overlap: drafting while the target verifies")
    task_prompts = drafting.read_task_prompts(options)
    _with_model(options, task_prompts)
    _synthetic(options, task_prompts)


# --- a draft model ----------------------------------------------------------------------------


def _with_model(options: Options, task_prompts: TaskPrompts) -> None:
    base = drafting.modelled(options)
    if base is None:
        return
    write(f"{base.target.served_name}, {base.target.dtype}; {task_prompts.describe(options.answer_tokens)}")
    write(drafting.describe(base))
    found: dict[tuple[str, int], Passes] = {}
    with ExitStack() as stack:
        clusters_by_name = _open(stack, base)
        for cluster in clusters_by_name.values():
            drafting.warm(cluster, task_prompts.prompts, options.answer_tokens, BATCHES)
        for repeat in range(options.repeats):
            for batch in BATCHES:
                for name, cluster in clusters_by_name.items():
                    if batch == 1 and name == ALTERNATE:
                        continue
                    passes = found.setdefault((name, batch), Passes())
                    prompts = task_prompts.at_least(2 * batch)
                    drafting.measure(cluster, prompts, options.answer_tokens, batch, passes)
                    write(f"repetition {repeat + 1}, {name}, batch {batch}: {passes.rates[-1]:.1f} tokens/s")
    _report_modes(found)


def _open(stack: ExitStack, base: Configuration) -> dict[str, ProcessCluster]:
    """Start one target on the first core, and a drafter for each mode on the last."""
    cores = clusters.all_cores()
    target = stack.enter_context(clusters.target(base, cores[:1]))
    opened = {"plain": clusters.start_cluster(stack, drafting.changed(base, method="none"), target)}
    for mode in MODES:
        configuration = drafting.changed(base, model_changes={"mode": mode})
        drafter = stack.enter_context(clusters.draft(configuration, cores[-1:]))
        opened[mode] = clusters.start_cluster(stack, configuration, target, drafter)
    halves = drafting.changed(base, model_changes={"mode": MODES[-1]}, alternate="on")
    opened[ALTERNATE] = clusters.start_cluster(stack, halves, target, opened[MODES[-1]].draft)
    return opened


def _report_modes(found: dict[tuple[str, int], Passes]) -> None:
    rows: list[list[str]] = []
    for (name, batch), passes in found.items():
        serial, plain = found["serial", batch], found["plain", batch]
        rows.append(
            [
                name,
                str(batch),
                spread(passes.rates, 1),
                spread(ratios(passes.rates, serial.rates)),
                spread(ratios(passes.rates, plain.rates)),
                spread(passes.committed),
                *_shares(passes),
                passes.equal(plain),
            ]
        )
    columns = ("mode", "batch", "tokens/s", "÷ serial", "÷ plain, target's core", "τ")
    table((*columns, "ready when asked", "drafter idle", "target idle", "equal to plain's"), rows)
    write("drafter and target on one core each; ready: share of proposed nodes that existed before the call")


def _shares(passes: Passes) -> list[str]:
    """The hit rate and the idle shares of drafter and target, as percentages."""
    columns = ("hit_rate", "draft_idle", "target_idle")
    return [f"{spread([getattr(activity, name) * 100 for activity in passes.activity], 0)} %" for name in columns]


# --- synthetic acceptance ---------------------------------------------------------------------


def _synthetic(options: Options, task_prompts: TaskPrompts) -> None:
    """Measure chains of `LENGTH` drafted tokens in every round, with the controller off."""
    write(f"\nSynthetic acceptance. {NOT_LOSSLESS}.")
    rows: list[list[str]] = []
    for acceptance in QUICK_ACCEPTANCES if options.quick else ACCEPTANCES:
        rows.extend(_Experiment(options, task_prompts, acceptance).rows())
    write(f"\n{NOT_LOSSLESS}:")
    columns = (
        "α",
        "c",
        "E[tokens]",
        "τ",
        "serial ÷ plain",
        "E ÷ (γc + 1 + δ)",
        "run-ahead ÷ plain",
        "E ÷ max(1 + δ, γc)",
    )
    table((*columns, "run-ahead ÷ serial", "ready when asked", "drafter idle", "target idle"), rows)
    write(f"batch 1, γ = {LENGTH} drafted tokens a round; α: acceptance rate; c: time to draft one, in plain rounds;")
    write("δ: time of a round beyond step and drafting, measured with c = 0. The last formula assumes that run-ahead")
    write("drafting predicts every verdict.")


class _Experiment:
    """The measurements at one acceptance rate. They share a target."""

    def __init__(self, options: Options, task_prompts: TaskPrompts, acceptance: float) -> None:
        self._options = options
        self._prompts = task_prompts.prompts[:SYNTHETIC_PROMPTS]
        self._acceptance = acceptance

    def rows(self) -> list[list[str]]:
        """The rows of the table, one for each drafting cost."""
        costless = self._configuration("serial", 0.0)
        with ExitStack() as stack:
            target = stack.enter_context(clusters.target(costless, clusters.all_cores()))
            free = clusters.start_cluster(stack, costless, target)
            plain, undelayed = Passes(), Passes()
            drafting.warm(free, self._prompts, self._options.answer_tokens, (1,))
            for _ in range(self._options.repeats):
                self._measure(free, plain, PLAIN)
                self._measure(free, undelayed)
            step = statistics.median(_round_seconds(plain))
            overhead = statistics.median(ratios(_round_seconds(undelayed), _round_seconds(plain))) - 1
            costs = QUICK_COSTS if self._options.quick else COSTS
            return [self._row(target, free, cost, step, overhead) for cost in costs]

    def _row(
        self, target: clusters.RoleProcess, free: ProcessCluster, cost: float, step: float, overhead: float
    ) -> list[str]:
        """Measure plain, serial and run-ahead decoding in turn."""
        plain, serial, ahead = Passes(), Passes(), Passes()
        with ExitStack() as stack:
            opened = [
                clusters.start_cluster(stack, self._configuration(mode, cost * step), target) for mode in MODES[:2]
            ]
            for cluster in opened:
                drafting.warm(cluster, self._prompts, self._options.answer_tokens, (1,))
            for _ in range(self._options.repeats):
                self._measure(free, plain, PLAIN)
                self._measure(opened[0], serial)
                self._measure(opened[1], ahead)
        rates = [[answers.decoding_rate for answers in passes.answers] for passes in (plain, serial, ahead)]
        write(f"α = {self._acceptance}, c = {cost}: {' / '.join(f'{values[-1]:.1f}' for values in rates)} tokens/s")
        return [
            f"{self._acceptance:g}",
            f"{cost:g}",
            f"{theory.expected_tokens(self._acceptance, LENGTH):.2f}",
            spread(serial.committed),
            spread(ratios(rates[1], rates[0])),
            f"{theory.serial_speedup(self._acceptance, LENGTH, cost, overhead):.2f}",
            spread(ratios(rates[2], rates[0])),
            f"{theory.overlapped_speedup(self._acceptance, LENGTH, cost, overhead):.2f}",
            spread(ratios(rates[2], rates[1])),
            *_shares(ahead),
        ]

    def _measure(self, cluster: ProcessCluster, into: Passes, request_options: RequestOptions = DRAFTED) -> None:
        drafting.measure(cluster, self._prompts, self._options.answer_tokens, 1, into, request_options)
        if any(answer.is_lossless for answer in into.answers[-1].each):
            raise RuntimeError("a synthetic answer does not say that it is not lossless")

    def _configuration(self, mode: str, seconds: float) -> Configuration:
        return self._options.based_on(
            *drafting.ROOM,
            "draft.method=synthetic",
            f"draft.synthetic.mode={mode}",
            f"draft.synthetic.acceptance=[{self._acceptance}]",
            f"draft.synthetic.seconds={seconds}",
            f"draft.max_nodes={LENGTH}",
            f"draft.max_depth={LENGTH}",
            "draft.controller=off",
        )


def _round_seconds(passes: Passes) -> list[float]:
    """Mean time of a round after the first tokens, in seconds, per pass."""
    return [
        sum(answer.decoding_seconds for answer in answers.each) / sum(answer.steps - 1 for answer in answers.each)
        for answers in passes.answers
    ]
