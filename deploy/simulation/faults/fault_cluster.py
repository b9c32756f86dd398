"""The simulated cluster of one fault schedule: its processes, and how they are killed, frozen and started again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence

from cluster.core.config.load import load
from cluster.core.errors import PilotfishError
from cluster.core.verification import StepSample
from deploy.simulation.block_memory import BlockMemory
from deploy.simulation.faults.schedule import EOS_TOKENS, MAX_CONTEXT_LEN, VOCABULARY_SIZE, FaultEvent, FaultSchedule
from deploy.simulation.hashed_model import HashedModel
from deploy.simulation.invariants import Ledger
from deploy.simulation.network import KEEPALIVE_SECONDS, Network
from deploy.simulation.nodes import CoordinatorAddresses, CoordinatorNode, DrafterNode, TargetNode
from deploy.simulation.simulated_drafter import SimulatedDrafter
from deploy.simulation.simulated_ingress import HEARTBEAT_SECONDS, IngressNode, SimulatedDirectory
from deploy.simulation.simulated_target import SimulatedTarget, StepRow, TargetStart
from deploy.simulation.virtual_time import Process
from deploy.simulation.weather import FaultyWeather

Trace = Callable[[str], None]

DRAIN_SLACK_SECONDS = 5.0
"""A coordinator that drains is killed this long after its drain time."""
MAX_TASKS = 100
"""Most tasks of one coordinator. Its requests are few."""
MAX_CALLS = 100
"""Most calls under way in the cluster."""
LEASE_SECONDS = 5.0
"""A drafter releases what a coordinator holds after this silence."""


class FaultCluster:
    """Targets with a coordinator each, a pool of drafters, and ingresses with a router each."""

    def __init__(self, schedule: FaultSchedule, ledger: Ledger, trace: Trace) -> None:
        self.schedule = schedule
        self.ledger = ledger
        self.model = HashedModel(VOCABULARY_SIZE, EOS_TOKENS)
        self.weather = FaultyWeather(random.Random(schedule.seed + 1), schedule.latency_seconds, schedule.windows)
        self.network = Network(self.weather)
        self.configuration = load({}, schedule.settings)
        self.targets: list[TargetNode] = []
        self.drafters: list[DrafterNode] = []
        self.coordinators: list[CoordinatorNode] = []
        self.ingresses: list[IngressNode] = []
        self.directory = SimulatedDirectory()
        self.kills = Counter[str]()
        self.freezes = Counter[str]()
        self._trace = trace
        self._starts = 0

    def start(self) -> None:
        """Start all processes."""
        schedule = self.schedule
        self.targets = [self._target(index) for index in range(schedule.targets)]
        self.drafters = [self._drafter(index) for index in range(schedule.drafters)]
        self.coordinators = [self._coordinator(index) for index in range(schedule.targets)]
        self.ingresses = [self._ingress(index) for index in range(schedule.ingresses)]

    async def inject(self, event: FaultEvent) -> None:
        """Let one fault happen, and repair it."""
        await asyncio.sleep(event.at)
        self._trace(f"{event.kind} {event.role}-{event.index} for {event.seconds} s")
        match event.kind:
            case "kill" | "vanish":
                self.kills[event.role] += 1
                self._process(event).kill(KEEPALIVE_SECONDS if event.kind == "vanish" else 0.0)
                await asyncio.sleep(event.seconds)
                self._restart(event)
            case "freeze":
                self.freezes[event.role] += 1
                frozen = self._process(event)
                frozen.freeze()
                await asyncio.sleep(event.seconds)
                frozen.thaw()
            case "drain":
                draining = self.coordinators[event.index]
                if draining.process.is_alive:
                    stopping = draining.process.spawn(draining.stop(event.seconds))
                    await asyncio.wait({stopping}, timeout=event.seconds + DRAIN_SLACK_SECONDS)
                    draining.process.kill()
                    self._restart(event)
            case "shortage":
                memory = self.targets[event.index].target.memory
                memory.occupied = memory.total
                await asyncio.sleep(event.seconds)
                memory.occupied = 0
            case "stale":
                node = self.drafters[event.index]
                rng = random.Random(self.schedule.seed + 2)
                node.answers_stale = lambda: rng.random() < 0.5
                await asyncio.sleep(event.seconds)
                node.answers_stale = lambda: False
        self.check_bounds()
        self._trace(f"{event.role}-{event.index} is repaired after {event.kind}")

    async def supervise(self) -> None:
        """Send heartbeats and expire leases."""
        while True:
            self.directory.beat(self.coordinators)
            for ingress in self.ingresses:
                ingress.note_members()
            self.check_bounds()
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for drafter in self.drafters:
                if drafter.process.is_alive and not drafter.process.is_frozen:
                    drafter.expire()

    def check_bounds(self) -> None:
        """Check what must hold at every moment."""
        for node in self.targets:
            try:
                node.target.check()
            except PilotfishError as error:
                self.ledger.violate(f"{node.process.name}: {error}")
        limits = self.configuration.scheduler
        for coordinator in self.coordinators:
            if not coordinator.coordinator.ready:
                continue
            load, name = coordinator.view().load, coordinator.process.name
            if load.running > limits.max_sequences:
                self.ledger.violate(f"{name} runs {load.running} of {limits.max_sequences} sequences")
            if load.running + load.waiting > limits.max_sequences + limits.max_waiting:
                self.ledger.violate(f"{name} has {load.waiting} waiting sequences, {limits.max_waiting} are allowed")
            if len(coordinator.process.tasks) > MAX_TASKS:
                self.ledger.violate(f"{name} has {len(coordinator.process.tasks)} tasks")
        if self.network.under_way > MAX_CALLS:
            self.ledger.violate(f"{self.network.under_way} calls are under way")

    def leaks(self) -> list[str]:
        """What is held although no request runs."""
        found: list[str] = []
        for node in self.targets:
            held = node.target.sequences
            if held:
                found.append(f"{node.process.name} holds {len(held)} sequences: {', '.join(held)}")
            elif node.target.memory.free != node.target.memory.total:
                found.append(
                    f"{node.process.name}: {node.target.memory.free} of {node.target.memory.total} blocks are free"
                )
        found += [
            f"{node.process.name} holds {len(node.drafter.known)} sequences: {', '.join(node.drafter.known)}"
            for node in self.drafters
            if node.drafter.known
        ]
        servers = [node.process for node in self.targets]
        servers += [node.process for node in self.drafters]
        servers += [node.process for node in self.ingresses]
        found += [f"{process.name} still has {len(process.tasks)} tasks" for process in servers if process.tasks]
        found += [f"{node.process.name} is not ready" for node in self.coordinators if not node.coordinator.ready]
        if self.network.under_way > 2 * len(self.coordinators):
            found.append(f"{self.network.under_way} calls are under way")
        return found

    def _process(self, event: FaultEvent) -> Process:
        match event.role:
            case "target":
                return self.targets[event.index].process
            case "draft":
                return self.drafters[event.index].process
            case "coordinator":
                return self.coordinators[event.index].process
        return self.ingresses[event.index].process

    def _restart(self, event: FaultEvent) -> None:
        if self._process(event).is_alive:
            return  # another fault has restarted it
        match event.role:
            case "target":
                self.targets[event.index] = self._target(event.index)
            case "draft":
                self.drafters[event.index] = self._drafter(event.index)
            case "coordinator":
                self.coordinators[event.index] = self._coordinator(event.index)
            case "ingress":
                self.ingresses[event.index] = self._ingress(event.index)

    def _step_time(self, rows: Sequence[StepRow]) -> float:
        return self.schedule.step_seconds * (1 + 0.02 * sum(row.width for row in rows))

    def _target(self, index: int) -> TargetNode:
        schedule = self.schedule
        self._starts += 1
        memory = BlockMemory(schedule.blocks, schedule.block_size, prefix_cache=schedule.prefix_cache)
        drafter = SimulatedDrafter(self.model, schedule.skill, schedule.speed)
        profile = tuple(StepSample(1, tokens, self._step_time([StepRow(0, tokens)])) for tokens in (1, 4, 16))
        start = TargetStart(str(self._starts), MAX_CONTEXT_LEN, profile)
        own_drafter = drafter if self.configuration.draft.is_colocated else None
        target = SimulatedTarget(self.model, memory, self._step_time, start, own_drafter)
        return TargetNode(self.network, f"target-{index}", target)

    def _drafter(self, index: int) -> DrafterNode:
        drafter = SimulatedDrafter(self.model, self.schedule.skill, self.schedule.speed)
        return DrafterNode(self.network, f"draft-{index}", drafter, LEASE_SECONDS)

    def _coordinator(self, index: int) -> CoordinatorNode:
        self._starts += 1
        drafters = [f"draft-{number}" for number in range(self.schedule.drafters)]
        own = f"coordinator-{index}"
        addresses = CoordinatorAddresses(own, f"target-{index}", drafters, f"{own}-{self._starts}")
        return CoordinatorNode(self.network, addresses, self.configuration, self.ledger)

    def _ingress(self, index: int) -> IngressNode:
        return IngressNode(self.network, f"ingress-{index}", self.directory)
