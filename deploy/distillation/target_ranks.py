"""The target of a distillation on ranks in processes: Ray places them, and those that are lost start again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from cluster.core.config.sections import Configuration
from cluster.wire.peer_access import PeerAccess
from cluster.wire.target_client import GrpcTarget
from deploy.distillation.one_rank import TargetRanks, of_ranks
from deploy.local.local_cluster import LOOPBACK
from deploy.machine import local_resources
from deploy.network.cluster_token import draw_token
from deploy.placement import Placement, Resources, plan, strategy
from deploy.preflight import capacity_problems, model_problems, raise_problems
from deploy.ray.start_ray import start_local_ray
from workers.serve.rank_actors import RankActors, rank_kinds
from workers.serve.rank_placement import RankPlacement
from workers.serve.rank_supervisor import RankSupervisor

_GONE_SECONDS, _LOOK_SECONDS = 30.0, 0.05
"""Longest wait until processes and the placement of ranks are gone, and pause between two looks at the placement."""


@asynccontextmanager
async def target_ranks(configuration: Configuration, taps: Sequence[int] = ()) -> AsyncIterator[TargetRanks]:
    """Inside, `target.tensor_parallel` ranks of the target run on this machine. Model paths are local directories.

    With `taps`, the target sends these hidden states of every token, and keeps nothing for texts with the same prefix.
    The processes of the ranks have ended after it, so that others may have their memory at once.

    Raises `ConfigurationError` where this machine has too few GPUs, cores or memory, and what the ranks raise.
    """
    configuration = of_ranks(configuration, taps)
    resources = local_resources()
    placement = plan(configuration, [resources])
    _check(configuration, placement, resources)
    if not ray.is_initialized():
        start_local_ray(resources)
    # As for a served target, the first bundle is that of the ranks' owner, which is this process.
    bundles = [bundle.claims() for bundle in (*placement.coordinator.bundles, *placement.target.bundles)]
    kinds, role = rank_kinds(configuration.target.tensor_parallel), placement.target
    access = PeerAccess(draw_token(), configuration.cluster.tls)
    step_timeout, lease_seconds = configuration.target.step_timeout_seconds, configuration.cluster.lease_seconds
    launched: list[RankActors] = []
    async with AsyncExitStack() as stack:  # it does what is pushed last first
        group = placement_group(bundles, strategy(spans_nodes=False))
        stack.push_async_callback(_until_gone, launched, group)
        stack.callback(remove_placement_group, group)
        places = RankPlacement(kinds, role.environment, standby=False, group=group)

        def launch() -> RankActors:
            launched.append(RankActors(configuration, role.threads, LOOPBACK, places, access))
            return launched[-1]

        supervisor = RankSupervisor(launch)
        stack.push_async_callback(supervisor.stop)
        target = GrpcTarget(supervisor.address, access, step_timeout, lease_seconds)
        stack.push_async_callback(target.close)
        await supervisor.start()
        yield TargetRanks(target, supervisor)


async def _until_gone(launched: Sequence[RankActors], group: PlacementGroup) -> None:
    """Return once no process of ended ranks is left and their placement is removed. It waits for so long at most."""
    processes = []
    for process_id in (one for ranks in launched for one in ranks.process_ids()):
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(process_id))
    await asyncio.to_thread(_wait_until_gone, processes, group)


def _wait_until_gone(processes: Sequence[psutil.Process], group: PlacementGroup) -> None:
    ends = time.monotonic() + _GONE_SECONDS
    psutil.wait_procs(processes, timeout=_GONE_SECONDS)
    while time.monotonic() < ends and placement_group_table(group).get("state") not in (None, "REMOVED"):
        time.sleep(_LOOK_SECONDS)


def _check(configuration: Configuration, placement: Placement, resources: Resources) -> None:
    """Raise `ConfigurationError` where the ranks do not fit this machine, or cannot divide the model."""
    raise_problems(capacity_problems(placement, [resources]))
    raise_problems(model_problems(configuration, placement, [resources], Path(configuration.target.path), None))
