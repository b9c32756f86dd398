"""One role of a cluster in a process of its own, which may be killed or stopped at any moment.

The parent sends `{"ask": …}` through a pipe and gets one answer per question. The process ends with its parent. Modules
that load torch are imported by the fork server, so that a process starts in a fraction of a second.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import psutil
import torch
import uvicorn
from transformers.utils.logging import disable_progress_bar

from cluster.core.config.sections import Configuration
from cluster.core.errors import PilotfishError
from cluster.core.ports import DraftMethod
from cluster.ingress.grpc import RoutedGenerationServicer
from cluster.ingress.http import create_app
from cluster.ingress.observability.operations import RoutedOperationsServicer
from cluster.ingress.router.router import Router
from cluster.wire.connection import fixed_address
from cluster.wire.coordinator_client import CoordinatorClient
from cluster.wire.drafter_client import GrpcDrafter
from cluster.wire.server import GENERATION_SERVICE, OPERATIONS_SERVICE, WireServer
from cluster.wire.target_client import GrpcTarget
from deploy.coordinator_server import CoordinatorServer
from pilotfish.v1 import generation_pb2_grpc, operations_pb2_grpc
from tests.support.clusters.coordinators import coordinator
from workers.draft.registry import create, create_for_worker_rank
from workers.serve.configuration import load_configuration
from workers.serve.learning.learner import Learner, LearnerOptions, start_learner
from workers.serve.lease_servicer import Leases
from workers.serve.worker_server import WorkerHost, host_draft, host_target
from workers.verify.build import build_engine
from workers.verify.group import DriverRank, join_group, leave_group, run_worker_rank

LOOPBACK = "127.0.0.1"
LEASE_SECONDS = 5.0
"""Silence after which a drafter releases what a coordinator holds, in seconds."""

FRESH_TEXTS = 24
"""New texts after which drafts that learn are trained."""

RoleKind = Literal["target", "rank", "draft", "coordinator", "ingress"]


@dataclass(frozen=True)
class RoleSpec:
    """What a process is: its role, its configuration, and the addresses of the processes that it calls."""

    kind: RoleKind
    configuration: str
    """The configuration as JSON, with what drafting on the target implies. Model paths are local directories."""
    rank: int = 0
    rendezvous: int = 0
    """Port at which the ranks of a target meet."""
    target: str = ""
    drafts: tuple[str, ...] = ()
    coordinators: tuple[str, ...] = ()
    learner: tuple[str, ...] = ()
    """Starts the learner's process, where drafts learn."""

    def to_json(self) -> str:
        """The role as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RoleSpec:
        """The role from text."""
        values = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("drafts", "coordinators", "learner")}
        return cls(**values | lists)


@dataclass(frozen=True)
class RunningRole:
    """A role that serves."""

    address: str
    check_health: Callable[[], None]
    """Raises when the process must be replaced."""
    held: Callable[[], dict[str, int]] = dict
    """What it holds for others: numbers of sequences and blocks."""
    http_url: str = ""


def run_role(spec: str, pipe: Connection, log: str) -> None:
    """Run a role until the parent ends. It is the main function of the process."""
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.enable()
    torch.set_num_threads(1)
    role = RoleSpec.from_json(spec)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {role.kind} %(process)d: %(message)s", force=True)
    disable_progress_bar()  # its lock would be left behind by a killed process
    asyncio.run(_serve(role, pipe))
    sys.stderr.flush()
    os._exit(0)


async def _serve(role: RoleSpec, pipe: Connection) -> None:
    configuration = load_configuration(json.loads(role.configuration))
    async with AsyncExitStack() as stack:
        running = await _STARTS[role.kind](role, configuration, stack)
        pipe.send_bytes(json.dumps({"address": running.address, "http_url": running.http_url}).encode())
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(pipe.fileno(), lambda: _answer(pipe, running, ended))
        await ended.wait()


def _answer(pipe: Connection, running: RunningRole, ended: asyncio.Event) -> None:
    try:
        question = json.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        os._exit(1)  # the parent is gone, or does not want this process any more
    answer: dict[str, Any] = {"number": question["number"]}
    if question["ask"] == "stop":
        ended.set()
    elif question["ask"] == "held":
        process = psutil.Process()
        answer |= {"held": running.held(), "descriptors": process.num_fds(), "memory": process.memory_info().rss}
    else:
        try:
            running.check_health()
        except PilotfishError as error:
            answer["unhealthy"] = str(error)
    pipe.send_bytes(json.dumps(answer).encode())


async def _start_target(role: RoleSpec, configuration: Configuration, stack: AsyncExitStack) -> RunningRole:
    target = configuration.target
    if target.tensor_parallel > 1:
        await asyncio.to_thread(join_group, target, 0, LOOPBACK, role.rendezvous)
    draft = configuration.draft
    method = await asyncio.to_thread(create, draft, target) if draft.is_colocated else None
    engine = await asyncio.to_thread(build_engine, target, method=method)
    driver = DriverRank(engine, target.step_timeout_seconds) if target.tensor_parallel > 1 else None
    learner = await _start_learner(role, configuration, method, lambda: engine.is_idle)
    learning = None if learner is None else learner.status
    hosting = host_target(LOOPBACK, driver or engine, hang_seconds=target.step_timeout_seconds, learning=learning)
    host = await stack.enter_async_context(hosting)

    def check_health() -> None:
        host.check_health()
        if driver is not None and driver.failure is not None:
            raise PilotfishError(driver.failure)

    def held() -> dict[str, int]:
        return {"sequences": len(engine._sequences), "blocks": engine._pool.blocks_total - engine._pool.blocks_free}

    return RunningRole(host.address, check_health, held)


async def _start_rank(role: RoleSpec, configuration: Configuration, stack: AsyncExitStack) -> RunningRole:
    target = configuration.target

    def run() -> None:
        join_group(target, role.rank, LOOPBACK, role.rendezvous)
        try:
            method = create_for_worker_rank(configuration.draft, target)
            run_worker_rank(build_engine(target, role.rank, method), target.step_timeout_seconds)
        finally:
            leave_group()

    running = asyncio.create_task(asyncio.to_thread(run))

    def check_health() -> None:
        if running.done():
            raise PilotfishError(f"the rank has ended: {running.exception()!r}")

    return RunningRole("", check_health)


async def _start_draft(role: RoleSpec, configuration: Configuration, stack: AsyncExitStack) -> RunningRole:
    method = await asyncio.to_thread(create, configuration.draft, configuration.target)
    leases = Leases(LEASE_SECONDS)
    learner = await _start_learner(role, configuration, method, lambda: leases.is_empty)
    hosting = host_draft(LOOPBACK, method, leases=leases, learner=learner)
    host: WorkerHost = await stack.enter_async_context(hosting)
    sessions: Any = getattr(method, "_sessions", ())
    return RunningRole(host.address, host.check_health, lambda: {"sequences": len(sessions)})


async def _start_learner(
    role: RoleSpec, configuration: Configuration, method: DraftMethod | None, is_idle: Callable[[], bool]
) -> Learner | None:
    """A learner that trains often, where the method learns in this process."""
    if configuration.draft.learn == "off" or method is None:
        return None
    options = LearnerOptions(role.learner, fresh_texts=FRESH_TEXTS, least_held_back=3, idle_seconds=0.2)
    return await asyncio.to_thread(start_learner, configuration, method, is_idle, options)


async def _start_coordinator(role: RoleSpec, configuration: Configuration, stack: AsyncExitStack) -> RunningRole:
    step_timeout = configuration.target.step_timeout_seconds
    target = GrpcTarget(fixed_address(role.target), step_timeout_seconds=step_timeout)
    stack.push_async_callback(target.close)
    drafters = [GrpcDrafter(fixed_address(address)) for address in role.drafts]
    for drafter in drafters:
        stack.push_async_callback(drafter.close)
    server = CoordinatorServer(configuration, target, drafters, internal_host=LOOPBACK)
    stack.push_async_callback(server.stop, 0.0)
    port = await server.start()
    table = server.coordinator._table
    return RunningRole(
        f"{LOOPBACK}:{port}",
        server.check_health,
        lambda: {"requests": len(table), "tasks": len(asyncio.all_tasks())},
    )


async def _start_ingress(role: RoleSpec, configuration: Configuration, stack: AsyncExitStack) -> RunningRole:
    views = tuple(coordinator(f"coordinator-{n}", address) for n, address in enumerate(role.coordinators))
    router = Router(lambda: views, lambda address: CoordinatorClient(fixed_address(address)))
    stack.push_async_callback(router.close)
    server = await stack.enter_async_context(WireServer(LOOPBACK, 0))
    generation = RoutedGenerationServicer(router, configuration.limits.max_timeout_seconds)
    add_to_server = generation_pb2_grpc.add_GenerationServiceServicer_to_server
    server.add(GENERATION_SERVICE, add_to_server, generation)
    add_to_server = operations_pb2_grpc.add_OperationsServiceServicer_to_server
    server.add(OPERATIONS_SERVICE, add_to_server, RoutedOperationsServicer(router))
    port = await server.start()
    listener = socket.create_server((LOOPBACK, 0))
    app = create_app(router, configuration.limits)
    http = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(http.serve([listener]))

    def check_health() -> None:
        if serving.done():
            raise PilotfishError("the HTTP server has ended")

    return RunningRole(
        f"{LOOPBACK}:{port}",
        check_health,
        lambda: {"tasks": len(asyncio.all_tasks())},
        f"http://{LOOPBACK}:{listener.getsockname()[1]}",
    )


_STARTS: dict[RoleKind, Callable[..., Any]] = {
    "target": _start_target,
    "rank": _start_rank,
    "draft": _start_draft,
    "coordinator": _start_coordinator,
    "ingress": _start_ingress,
}
