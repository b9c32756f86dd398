"""How long a stream pauses when a process of the cluster is killed, by role, under Ray Serve.

One client streams a greedy answer over gRPC and continues by itself, as `pilotfish generate` does. In the middle, the
process is killed. The pause is the longest time between two tokens; the text is compared with that of an undisturbed
answer. Of the target's ranks, one that serves is killed, and by then one waits where the settings say so.
"""

from __future__ import annotations

import asyncio
import signal
import time
from itertools import pairwise

from cluster.ingress.router.router import Router
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from pilotfish.v1 import common_pb2, generation_pb2
from tests.bench.options import Options
from tests.bench.report import heading, spread, table, write
from tests.chaos.serve_harness import TITLES, ServeVictims
from tests.support.clusters.coordinators import coordinator
from tests.support.clusters.serve_process import ServeProcess
from tests.support.models.prompts import CHAT
from workers.serve.rank_placement import has_spare_ranks, waits_again

ROLES, QUICK_ROLES = ("draft", "ingress", "target", "coordinator"), ("target",)
TOKENS_BEFORE = 40
"""Tokens of the answer that arrive before the kill."""
STREAM_SECONDS = 300.0
BACK_SECONDS = 120.0
"""Longest time until all processes are back."""
STANDBY_SECONDS = 10.0
"""Time for a standby process to load its libraries."""
CALM_SECONDS = 3.0
"""Pause before the next kill, in seconds: Serve checks the health of a new replica first."""


def run(options: Options) -> None:
    """Measure and report."""
    heading("Recovery: the longest pause of a stream whose cluster loses a process")
    settings = options.settings()
    tokens = options.answer_tokens * 4
    with ServeProcess(settings.cache_directory) as process:
        server = process.start(settings.configuration)
        standby = Standby(process)
        asyncio.run(standby.waits())
        victims = ServeVictims(process)
        write(f"processes: {victims.by_role()}; standby: {standby.wanted}; answers of {tokens} tokens")
        asyncio.run(_measure(options, victims, standby, server.grpc_address, tokens))


class Standby:
    """The first ranks that wait beside those that serve."""

    def __init__(self, process: ServeProcess) -> None:
        """The process must run a cluster."""
        configuration = process.configuration
        if configuration is None:
            raise RuntimeError("no cluster is running")
        target = configuration.target
        spare = target.replicas if has_spare_ranks(target, is_local=True) else 0
        self.wanted = 1 if waits_again(target, target.device) else spare
        self._serving = target.replicas
        self._process = process

    async def waits(self) -> None:
        """Return once they have loaded their libraries, if there are any."""
        until = time.monotonic() + BACK_SECONDS
        while self._count() < self._serving + self.wanted and time.monotonic() < until:  # noqa: ASYNC110 - as in `_back`
            await asyncio.sleep(CALM_SECONDS)
        await asyncio.sleep(STANDBY_SECONDS if self.wanted else 0.0)

    def _count(self) -> int:
        return len(self._process.descendants(TITLES["target"]))


async def _measure(options: Options, victims: ServeVictims, standby: Standby, address: str, tokens: int) -> None:
    prompt = options.tokenizer.encode(" ".join(CHAT))
    whole, usual = await _stream(address, prompt, tokens)
    rows = [["none", spread([usual]), "equal"]]
    present = victims.by_role()
    for role in options.variants or (QUICK_ROLES if options.quick else ROLES):
        if role not in present:
            continue  # there is no drafter where the target drafts
        pauses, equal = [], 0
        for _ in range(options.repeats):
            answer, pause = await _stream(address, prompt, tokens, role, victims)
            pauses.append(pause)
            equal += answer == whole
            await _back(victims)
            await standby.waits()
        rows.append([role, spread(pauses), f"{equal} of {options.repeats} equal"])
        write(f"{role}: {pauses}")
    table(("killed", "longest pause, s", "text"), rows)


async def _stream(
    address: str, prompt: tuple[int, ...], tokens: int, victim: str = "", victims: ServeVictims | None = None
) -> tuple[tuple[int, ...], float]:
    """The answer and its longest pause. A process of the role `victim` is killed in the middle."""
    view = coordinator("server", address)
    client = Router(lambda: (view,), lambda _: GenerationClient(fixed_address(address)))
    request = generation_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParameters(temperature=0.0, seed=0),
        stopping=generation_pb2.StoppingCriteria(max_tokens=tokens, ignore_eos=True),
    )
    received: list[int] = []
    arrivals: list[float] = []
    async for response in client.generate(request, STREAM_SECONDS):
        if response.delta.token_ids:
            received.extend(response.delta.token_ids)
            arrivals.append(time.perf_counter())
        if victims is not None and len(received) >= TOKENS_BEFORE:
            next(one for one in victims.victims() if one.kind == victim).signal(signal.SIGKILL)
            victims = None
    await client.close()
    return tuple(received), max(later - earlier for earlier, later in pairwise(arrivals))


async def _back(victims: ServeVictims) -> None:
    """Return when all processes are back, and a while after."""
    async with asyncio.timeout(BACK_SECONDS):
        while victims.missing():  # noqa: ASYNC110 - nobody tells when a process is back
            await asyncio.sleep(0.2)
    await asyncio.sleep(CALM_SECONDS)
