"""Drafting on rank 0 against a drafter elsewhere, simulated for an 8B target on an H100 with predicted step times.

The real coordinator runs on a virtual clock. A drafter elsewhere is as fast as rank 0 is. The
crossing point is the delay of a message up to which the drafter elsewhere is faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context

from deploy.simulation.capacity.capacity_run import simulate_capacity
from deploy.simulation.capacity.options import CapacityOptions
from deploy.simulation.capacity.predicted_times import predicted_times
from deploy.simulation.capacity.step_times import Times
from deploy.simulation.simulated_drafter import DrafterSpeed
from deploy.simulation.simulated_target import StepRow
from tests.bench.options import Options
from tests.bench.report import heading, table, write
from tests.bench.sections.remote import as_text, crossing

COST_RATIOS, QUICK_COST_RATIOS = (0.02, 0.05, 0.1, 0.2, 0.4), (0.1,)
"""Time of a pass of the drafter ÷ time of a plain step of the target."""
DELAYS = (0.0, 0.0002, 0.001, 0.005)
"""Delays of a message, in seconds: none, within a rack, within a building, within a city."""
NODES, ACCEPTANCE = 4, 0.7
SECONDS = 8.0
"""Virtual time of a run."""


@dataclass(frozen=True)
class Setup:
    """A drafter, how it works elsewhere, and the load."""

    name: str
    is_block: bool
    """Whether it drafts a tree in one pass instead of one pass for each level."""
    in_flight: int
    elsewhere: Mapping[str, bool]
    """Options that hold elsewhere alone."""


SETUPS = (
    Setup("a pass for each level, when asked", False, 1, {}),
    Setup("a pass for each level, ahead", False, 1, {"ahead": True}),
    Setup("a pass for each level, in halves", False, 16, {"alternate": True}),
    Setup("one pass, when asked", True, 1, {}),
    Setup("one pass, in halves", True, 16, {"alternate": True}),
)


def run(options: Options) -> None:
    """Simulate and report."""
    heading("Remote: drafting on rank 0 against a drafter elsewhere, simulated")
    cases = [(setup, ratio) for setup in SETUPS for ratio in (QUICK_COST_RATIOS if options.quick else COST_RATIOS)]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:  # each case is the same in any process
        rows = list(processes.map(_row, cases))
    shown = [f"elsewhere ÷ rank 0, {1e3 * delay:g} ms" for delay in DELAYS]
    rates = ("plain, tokens/s", "rank 0, tokens/s", "rank 0 ÷ plain")
    table(("drafts", "in flight", "cost ratio", *rates, *shown, "crossing, ms"), rows)
    write(f"always {NODES} drafted tokens, of which each is right with probability {ACCEPTANCE:g} after right ones;")
    write("cost ratio: a pass of the drafter ÷ a plain step of one row; one plain step takes")
    write(f"{1e3 * _plain_step(_times()):.2f} ms; ahead, only the likeliest outcome is drafted for")


def _row(case: tuple[Setup, float]) -> list[str]:
    setup, ratio = case
    plain = _rate(_options(setup, drafters=0), ratio, setup)
    local = _rate(_options(setup, placement="target"), ratio, setup)
    remote = [_rate(_options(setup, drafter_delay=delay, **setup.elsewhere), ratio, setup) for delay in DELAYS]
    found = crossing(DELAYS, [1 / rate for rate in remote], 1 / local)
    times = [f"{rate / local:.2f}" for rate in remote]
    rates = (f"{plain:.0f}", f"{local:.0f}", f"{local / plain:.2f}")
    return [setup.name, str(setup.in_flight), f"{ratio:g}", *rates, *times, as_text(found)]


def _options(setup: Setup, **changes: object) -> CapacityOptions:
    values = {"targets": 1, "drafters": 1, "in_flight": setup.in_flight, "lengths": "64:256:0", "network_delay": 0.0}
    values |= {"controller": "off", "acceptance": ACCEPTANCE, "max_nodes": NODES, "seconds": SECONDS}
    return CapacityOptions(**(values | changes))  # type: ignore[arg-type]


@cache
def _times() -> Times:
    """The predicted times of steps, which are counted once in a process. Drafts take what each case says."""
    return predicted_times(CapacityOptions(targets=1, drafters=0))


def _plain_step(times: Times) -> float:
    return times.step([StepRow(0, 1)])


def _rate(options: CapacityOptions, ratio: float, setup: Setup) -> float:
    """Tokens per second of all requests."""
    times = _times()
    one_pass = ratio * _plain_step(times)
    speed = DrafterSpeed(one_pass) if setup.is_block else DrafterSpeed(0.0, depth_seconds=one_pass)
    found = simulate_capacity(options, replace(times, drafter=speed), lambda _, __: None, drafts=options.drafters > 0)
    return found.tokens_per_second
