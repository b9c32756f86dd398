"""`pilotfish drafter`: serve one drafter, for an engine on other machines, until a signal arrives."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.core.errors import ConfigurationError
from cluster.wire.address import join_host_port
from deploy.commands.options import ConfigOption, SetOption
from deploy.network.cluster_token import is_token_given
from deploy.settings import Settings, load_settings
from deploy.terminal import notices
from workers.draft.registry import check_standalone, create, described

if TYPE_CHECKING:
    from cluster.core.ports import DraftMethod

CHAINS = (
    "draft.max_nodes=16",
    "draft.max_depth=16",
    "draft.model.candidates=1",
    "draft.model.width=1",
    "draft.model.mode=enumerate",
)
"""Settings below all others: another engine verifies chains, so a draft model proposes no siblings, and it expands its
drafts while the engine computes."""
_HEALTH_SECONDS = 1.0
"""Pause between checks of the drafter's health, in seconds."""

HostOption = Annotated[str, typer.Option(help="The address to listen at.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")]


def drafter(
    config: ConfigOption = None, assignments: SetOption = None, host: HostOption = "127.0.0.1", port: PortOption = 9100
) -> None:
    """Serve one drafter without a target: pilotfish drafter --set target.path=TARGET --set draft.path=DRAFT.

    An engine on another machine asks it for drafts, such as vLLM with the package pilotfish-vllm. Of the target, only
    the tokenizer and the configuration are read, where its directory is on this machine. The caller must present the
    cluster token. A drafter that cannot compute any more ends with an error, so that whoever started it starts another.
    """
    settings = load_settings(config, assignments or (), below=CHAINS)
    check_standalone(settings.configuration.draft)
    if not is_token_given(os.environ, settings.configuration.cluster.token_file):
        raise ConfigurationError(
            "PILOTFISH_CLUSTER_TOKEN: needed the token that callers present, found none; set it here and where the "
            "engine runs, or set cluster.token_file"
        )
    asyncio.run(_serve(settings, host, port))


async def _serve(settings: Settings, host: str, port: int) -> None:
    # Importing torch takes seconds, so the settings are checked first.
    from workers.serve.lease_servicer import Leases
    from workers.serve.worker_server import host_draft

    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    configuration = settings.configuration
    method = await asyncio.to_thread(_load, settings)
    server = host_draft(
        host,
        method,
        settings.access,
        leases=Leases(configuration.cluster.lease_seconds),
        hang_seconds=configuration.target.step_timeout_seconds,
        described=described(configuration.draft),
    )
    try:
        await server.start(port)
        address = join_host_port(host, int(server.address.rpartition(":")[2]))
        notices.print(f"drafts by {configuration.draft.name} at {address} (gRPC). Ctrl-C stops it.", markup=False)
        while not stopped.is_set():
            server.check_health()
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), _HEALTH_SECONDS)
    finally:
        await server.stop()
    notices.print("stopped", markup=False)


def _load(settings: Settings) -> DraftMethod:
    from deploy.models import with_draft_directory
    from workers.serve.node import set_threads

    found = with_draft_directory(settings.configuration, settings.cache_directory)
    if found.draft.threads:
        set_threads(found.draft.threads)
    return create(found.draft, found.target)
