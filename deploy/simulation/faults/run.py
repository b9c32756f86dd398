"""Runs one fault schedule and checks the invariants."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import Any

from deploy.simulation.faults.clients import SimulatedClient
from deploy.simulation.faults.fault_cluster import FaultCluster, Trace
from deploy.simulation.faults.schedule import FAULT_SECONDS, LONGEST_FAULT_SECONDS, FaultSchedule, derive
from deploy.simulation.invariants import Ledger
from deploy.simulation.remote import RemoteGeneration
from deploy.simulation.virtual_time import Stalled, current_process, now, run_virtual

TOO_LONG_SECONDS = 1000.0
"""Virtual seconds after which a run counts as stuck."""
SETTLE_SECONDS = 120.0
"""Virtual seconds within which everything that clients held is free again: several attempts of every release."""
STOP_SECONDS = 1.0


@dataclass(slots=True)
class FaultRun:
    """The outcome of one schedule."""

    seed: int
    violations: list[str] = field(default_factory=list)
    clients: int = 0
    complete: int = 0
    tokens: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    """Number of killed processes by role."""
    freezes: dict[str, int] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)
    """Disturbed messages by fault."""
    steps: int = 0
    accepted: int = 0
    """Accepted draft tokens."""
    seconds: float = 0.0
    """Virtual time of the run, in seconds."""


def run_schedule(seed: int, trace: Trace | None = None) -> FaultRun:
    """Run the schedule of a seed. `trace` receives what happens, one line at a time."""
    run = FaultRun(seed)
    ledger = Ledger()
    run.violations = ledger.violations
    log = _LogCheck(ledger)
    watched = logging.getLogger("cluster")
    before = watched.level, watched.propagate
    watched.addHandler(log)
    watched.setLevel(logging.DEBUG if trace is not None else logging.ERROR)
    watched.propagate = False
    log.trace = trace
    try:
        run_virtual(_run(derive(seed), run, ledger, trace or _discard))
    except Stalled as error:
        ledger.violate(f"stalled: {error}")
    except TimeoutError:
        ledger.violate(f"the run did not end within {TOO_LONG_SECONDS:g} virtual seconds")
    finally:
        watched.removeHandler(log)
        watched.level, watched.propagate = before
    return run


async def _run(schedule: FaultSchedule, run: FaultRun, ledger: Ledger, trace: Trace) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: ledger.violate(f"unhandled: {_describe(context)}"))

    def note(text: str) -> None:
        trace(f"{now():10.6f} {text}")

    cluster = FaultCluster(schedule, ledger, note)
    async with asyncio.timeout(TOO_LONG_SECONDS):
        cluster.start()
        ingresses = [RemoteGeneration(cluster.network, f"ingress-{index}") for index in range(schedule.ingresses)]
        clients = [
            SimulatedClient(
                f"client-{index}",
                planned,
                ingresses[index % len(ingresses) :] + ingresses[: index % len(ingresses)],
                ledger,
            )
            for index, planned in enumerate(schedule.requests)
        ]
        faults = [asyncio.create_task(cluster.inject(event)) for event in schedule.events]
        supervision = asyncio.create_task(cluster.supervise())
        await asyncio.gather(*(client.run(cluster.model) for client in clients))
        await asyncio.gather(*faults)
        await asyncio.sleep(max(0.0, FAULT_SECONDS + LONGEST_FAULT_SECONDS - now()))
        await _settle(cluster, ledger)
        cluster.check_bounds()
        await _stop(cluster, ledger)
        supervision.cancel()
    run.clients = len(clients)
    run.complete = sum(client.outcome == "complete" for client in clients)
    run.tokens = sum(client.tokens for client in clients)
    run.kills, run.freezes = dict(cluster.kills), dict(cluster.freezes)
    run.messages = cluster.weather.counts
    run.steps = sum(node.target.steps for node in cluster.targets)
    run.accepted = int(sum(node.metrics.sums["vllm:spec_decode_num_accepted_tokens"] for node in cluster.coordinators))
    run.seconds = now()


async def _settle(cluster: FaultCluster, ledger: Ledger) -> None:
    """Wait until nothing is held any more."""
    until = now() + SETTLE_SECONDS
    while (leaks := cluster.leaks()) and now() < until:  # noqa: ASYNC110 - there is no event
        await asyncio.sleep(0.5)
    for leak in leaks:
        ledger.violate(f"leak: {leak}")


async def _stop(cluster: FaultCluster, ledger: Ledger) -> None:
    """Stop the coordinators. No task of theirs may be left."""
    for node in cluster.coordinators:
        stopping = node.process.spawn(node.stop(STOP_SECONDS))
        await asyncio.wait({stopping}, timeout=30.0)
        await asyncio.sleep(0)
        tasks = [f"{task.get_name()} {task.get_coro()}" for task in node.process.tasks]
        if tasks:
            ledger.violate(f"leak: {node.process.name} still has tasks: {', '.join(tasks)}")
        if node.metrics.sums["pilotfish:loop_restarts"]:
            ledger.violate(f"{node.process.name}: the loop failed because of a bug")


class _LogCheck(logging.Handler):
    """An error that the cluster logs is a violation."""

    trace: Trace | None = None

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def emit(self, record: logging.LogRecord) -> None:
        if self.trace is not None:
            self.trace(f"{now():10.6f} {record.name}: {record.getMessage()}")
        process = current_process()
        if record.levelno >= logging.ERROR and (process is None or process.is_alive):
            cause = f" ({record.exc_info[1]!r})" if record.exc_info else ""
            self._ledger.violate(f"logged: {record.getMessage()}{cause}")


def _describe(context: dict[str, Any]) -> str:
    return f"{context.get('message')} {context.get('exception')!r}"


def _discard(text: str) -> None:
    """Trace nothing."""
