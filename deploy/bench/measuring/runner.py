"""Runs the competitors of a benchmark: clusters in this process, decoding methods of `transformers`, servers by URL."""

from __future__ import annotations

import gc
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import psutil

from cluster.core.config.sections import Configuration
from cluster.core.errors import PilotfishError
from deploy.bench.contestants.endpoint import EndpointContestant
from deploy.bench.contestants.local import LocalContestant, local_contestant
from deploy.bench.contestants.peers import ASSISTED, GENERATE, Peer, TransformersPeer, load_assistant, load_target
from deploy.bench.measuring.competitors import Competitor
from deploy.bench.measuring.costs import configuration_cost
from deploy.bench.measuring.exactness import ROUNDING, Judge
from deploy.bench.measuring.results import Cost, Entry
from deploy.bench.measuring.session import BenchSession, Started
from deploy.bench.measuring.setup import resident_bytes
from deploy.bench.options import ContestOptions
from deploy.commands.client.connection import server_client
from deploy.network.https_client import check_reachable
from deploy.settings import Settings

logger = logging.getLogger(__name__)

_ROOM = 2.5
"""A second cluster with the target's weights is started only where this many times their bytes are free."""

_ENDPOINT_TIMEOUT_SECONDS = 3600.0
"""Longest answer of a server at a URL."""

_COUPLED = "coupled"
"""The acceptance rule with which sampled answers equal those of plain decoding."""


def has_room_for_two(configuration: Configuration, weight_bytes: int) -> bool:
    """Whether a second cluster fits into memory beside the one with plain decoding."""
    return configuration.target.device == "cuda" or psutil.virtual_memory().available > _ROOM * weight_bytes


@dataclass(frozen=True, slots=True)
class PeerMethods:
    """The decoding methods of `transformers` that are measured."""

    chosen: Sequence[Peer]
    find_draft: Callable[[], Path]
    """Finds the draft model of assisted generation."""
    seconds: float = 0.0
    """A method that takes longer for one pass through a task has no row there; see `TransformersPeer`."""


async def bench_clusters(
    session: BenchSession,
    plain: Configuration,
    competitors: Sequence[Competitor],
    peers: PeerMethods | None = None,
    *,
    together: int = 1,
) -> None:
    """Measure clusters in this process, then the methods `peers` of `transformers`.

    `together` competitors are held in memory at a time. Raises `PilotfishError` if plain decoding cannot start.
    """
    async with _plain_cluster(plain) as baseline:
        for group in groups(competitors, 1 if baseline is None else together):
            await _bench_group(session, plain, group, baseline)
            gc.collect()  # the weights of its clusters
        if peers is None:
            return
        if baseline is None:
            for peer in peers.chosen:
                session.skip(peer.name, "memory does not hold the target twice")
        elif peers.chosen:
            await _bench_peers(session, plain, peers, baseline)


def groups(competitors: Sequence[Competitor], together: int) -> list[list[Competitor]]:
    """The competitors in their order, `together` at a time. Those with other requests are in another group, because
    the members of a group share passes of plain decoding with the same requests.
    """
    found: list[list[Competitor]] = []
    for competitor in competitors:
        if not found or len(found[-1]) >= together or found[-1][0].request != competitor.request:
            found.append([])
        found[-1].append(competitor)
    return found


async def _bench_group(
    session: BenchSession, plain: Configuration, competitors: Sequence[Competitor], baseline: LocalContestant | None
) -> None:
    """Measure clusters that run side by side. Only one of them answers at a time."""
    async with AsyncExitStack() as stack:
        started: list[Started] = []
        contestant: LocalContestant | None = None
        for competitor in competitors:
            session.announce(f"starting {competitor.name}")
            before = resident_bytes()
            try:
                cluster = local_contestant(competitor.configuration, competitor.request)
                contestant = await stack.enter_async_context(cluster)
            except Exception as error:  # a method may raise anything; the others are measured all the same
                logger.exception("%s does not start", competitor.name)
                session.skip(competitor.name, str(error) or repr(error))
                continue
            grown = resident_bytes() - before
            shares_noise = competitor.configuration.target.acceptance == _COUPLED
            judge = Judge(ROUNDING[plain.target.dtype], shares_noise)
            started.append(Started(_entry(competitor, grown, is_plain_own=baseline is None), contestant, judge))
        if contestant is not None:
            below = contestant.without_drafts() if baseline is None else baseline.with_options(competitors[0].request)
            await session.measure(started, below)


def _entry(competitor: Competitor, grown_bytes: int, *, is_plain_own: bool) -> Entry:
    cost = configuration_cost(competitor.configuration, grown_bytes)
    return Entry(
        competitor.name,
        "cluster",
        competitor.assignments,
        replace(cost, sequences=competitor.request.beams),
        is_plain_own,
        competitor.request.name,
        competitor.alters_target,
    )


async def _bench_peers(
    session: BenchSession, plain: Configuration, peers: PeerMethods, baseline: LocalContestant
) -> None:
    """Measure the decoding methods of `transformers`, with one copy of the target.

    Those with the same requests share passes of plain decoding.
    """
    before = resident_bytes()
    model = load_target(plain)
    cost = configuration_cost(plain, resident_bytes() - before)
    judge = Judge(ROUNDING[plain.target.dtype], shares_noise=False)
    for request, found in groupby(peers.chosen, lambda peer: peer.request):
        started: list[Started] = []
        for peer in found:
            try:
                assistant = None
                if peer.method == ASSISTED:
                    assistant = load_assistant(peers.find_draft(), Path(plain.target.path), model)
            except PilotfishError as error:
                session.skip(peer.name, str(error))
                continue
            own = replace(cost, sequences=request.beams)
            if peer.method != GENERATE:
                own = replace(own, target_flops=0.0)  # it does not report how many tokens it drafted
            entry = Entry(peer.name, "peer", (), own, baseline=request.name)
            contestant = TransformersPeer(model, peer.method, assistant, request, peers.seconds)
            started.append(Started(entry, contestant, judge))
        if started:
            await session.measure(started, baseline.with_options(request))


async def bench_endpoints(
    session: BenchSession, options: ContestOptions, settings: Settings, *, predicts: bool = False
) -> None:
    """Measure the OpenAI-compatible server at `options.url`, against that at `options.plain_url` if there is one.

    Raises `WorkerUnavailable` for a server that does not answer or refuses the API key, before anything is measured.
    """
    async with AsyncExitStack() as stack:

        async def contestant(url: str | None, option: str, *, predicts: bool = False) -> EndpointContestant:
            opened = server_client(settings, url, options.cacert, _ENDPOINT_TIMEOUT_SECONDS, option)
            client = await stack.enter_async_context(opened)
            await check_reachable(client)
            return EndpointContestant(client, options.model or "", predicts=predicts)

        own = await contestant(options.url, "--url", predicts=predicts)
        plain = None if options.plain_url is None else await contestant(options.plain_url, "--plain-url")
        entry = Entry(options.url or "", "endpoint", (), Cost(devices=options.devices))
        await session.measure([Started(entry, own, Judge(0.0))], plain)


@asynccontextmanager
async def _plain_cluster(plain: Configuration) -> AsyncIterator[LocalContestant | None]:
    """A cluster without drafts, or `None` where memory does not hold it beside another cluster."""
    if not has_room_for_two(plain, configuration_cost(plain).target_bytes):
        yield None
        return
    async with local_contestant(plain) as baseline:
        yield baseline
