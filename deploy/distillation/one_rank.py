"""The target of a distillation on ranks of the serving engine: what they have in common, and one in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from cluster.core.ports import Target
from cluster.wire.peer_access import PeerAccess
from deploy.implied_settings import with_implied_settings
from deploy.local.local_cluster import host_one_rank
from deploy.network.cluster_token import draw_token
from workers.serve.configuration import load_configuration
from workers.serve.worker_server import WorkerHost

_HEALTH_SECONDS = 0.5
"""Pause between two looks whether the ranks are lost for good, in seconds."""

Result = TypeVar("Result")


class Supervisor(Protocol):
    """Watches ranks. `RankSupervisor` is one."""

    async def address(self) -> str:
        """The address at which the ranks serve, once they do. Raises `TargetUnavailable` if they never will again."""

    def check_health(self) -> None:
        """Raise `WorkerUnavailable` once the ranks are lost for good."""


@dataclass(frozen=True, slots=True)
class TargetRanks:
    """Ranks of a target that serve this process alone. Where they are processes and one is lost, all start again."""

    target: Target
    """Reaches the ranks, also those that have started again."""
    supervisor: Supervisor

    async def serving(self) -> None:
        """Return once the ranks serve: at once, unless they start again."""
        await self.supervisor.address()

    async def guarded(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of work that needs the ranks. Raises `WorkerUnavailable` once they are lost for good."""
        working, lost = asyncio.create_task(work), asyncio.create_task(self._until_lost())
        try:
            await asyncio.wait({working, lost}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else lost.result()
        finally:
            working.cancel()
            lost.cancel()
            await asyncio.gather(working, lost, return_exceptions=True)

    async def _until_lost(self) -> NoReturn:
        while True:
            self.supervisor.check_health()
            await asyncio.sleep(_HEALTH_SECONDS)


@dataclass(frozen=True, slots=True)
class _Hosted:
    """Watches the rank in this process, which is never started again. It is a `Supervisor`."""

    host: WorkerHost

    async def address(self) -> str:
        return self.host.address

    def check_health(self) -> None:
        self.host.check_health()


@asynccontextmanager
async def one_rank(configuration: Configuration, taps: Sequence[int] = ()) -> AsyncIterator[TargetRanks]:
    """Inside, the target runs on one rank in this process, without Ray. Model paths are local directories.

    With `taps`, the target sends these hidden states of every token, and keeps nothing for texts with the same prefix.
    Raises `ConfigurationError`, `ModelLoadError`.
    """
    configuration = of_ranks(configuration, taps)
    async with host_one_rank(configuration, PeerAccess(draw_token(), configuration.cluster.tls)) as (target, host):
        yield TargetRanks(target, _Hosted(host))


def of_ranks(configuration: Configuration, taps: Sequence[int]) -> Configuration:
    """The configuration with all that drafts imply, of one replica, which may show hidden states."""
    if configuration.target.span_nodes:
        raise ConfigurationError("target.span_nodes: true is refused; the ranks of a distillation are on one machine")
    changes: dict[str, Any] = {"replicas": 1, "standby": False}
    if taps:
        changes |= {"evidence.taps": tuple(taps), "evidence.is_sent": True}
        changes |= {"kv.prefix_cache": False, "kv.host_bytes": 0, "kv.disk_directory": None}
    values = with_implied_settings(configuration).model_dump(mode="json")
    return load_configuration(values, {f"target.{name}": value for name, value in changes.items()})
