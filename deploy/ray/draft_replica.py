"""The Serve deployment of a drafter: one drafting method behind `DraftService`.

A process whose method needs no weights does not import torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray import serve

from cluster.core.membership import Member, MemberRole
from cluster.core.ports import DraftMethod
from cluster.wire.peer_access import PeerAccess
from deploy.ray.directory import DirectoryClient, member_id
from deploy.ray.node_models import with_local_drafts
from workers.draft.registry import create, described
from workers.serve.configuration import load_configuration
from workers.serve.lease_servicer import Leases
from workers.serve.logs import set_logging
from workers.serve.node import compute_without_interruption, node_address, offer_to_end_first, set_threads
from workers.serve.worker_server import WorkerHost, host_draft

if TYPE_CHECKING:
    from workers.serve.learning.learner import Learner


class DraftReplica:
    """The Serve replica of a drafter: hosts one drafting method behind `DraftService`, and registers."""

    def __init__(
        self, values: Mapping[str, Any], version: str, threads: int, worker_host: str | None, access: PeerAccess
    ) -> None:
        configuration = load_configuration(values)
        self._configuration = configuration if worker_host is not None else with_local_drafts(configuration)
        context = serve.get_replica_context()
        self._threads = threads
        self._host_address = worker_host or node_address()
        self._access = access
        self._member = Member(MemberRole.DRAFTER, member_id(context), "", version)
        self._host: WorkerHost | None = None
        self._directory = DirectoryClient(context.app_name, lambda: self._member)

    async def reconfigure(self, user_config: Mapping[str, str]) -> None:
        """Start the drafter at the first call. Serve counts the replica as ready when this returns."""
        set_logging(user_config["log_level"], user_config["log_format"], "drafter")
        if self._host is None:
            offer_to_end_first()
            method = await asyncio.to_thread(self._load)
            leases = Leases(self._configuration.cluster.lease_seconds)
            hang_seconds = self._configuration.target.step_timeout_seconds
            host = host_draft(
                self._host_address,
                method,
                self._access,
                leases=leases,
                hang_seconds=hang_seconds,
                described=described(self._configuration.draft),
                learner=await asyncio.to_thread(self._start_learner, method, leases),
            )
            await host.start()
            self._host = host
            self._member = replace(self._member, address=host.address)
            await self._directory.beat()
            self._directory.start()

    async def check_health(self) -> None:
        """Raise an error if this replica is unusable, so that Serve replaces it."""
        self._directory.check_health()
        if self._host is not None:
            self._host.check_health()

    async def __del__(self) -> None:
        """Leave and stop. Serve awaits this when it shuts the replica down."""
        await self._directory.stop()
        if self._host is not None:
            await self._host.stop()

    def _start_learner(self, method: DraftMethod, leases: Leases) -> Learner | None:
        """The learner of the method, if it learns: while no client stores a sequence here."""
        if self._configuration.draft.learn == "off":
            return None
        from workers.serve.learning.learner import start_learner

        return start_learner(self._configuration, method, lambda: leases.is_empty)

    def _load(self) -> DraftMethod:
        if self._configuration.draft.weights is not None:
            compute_without_interruption()
            set_threads(self._threads)
        return create(self._configuration.draft, self._configuration.target)
