"""Translates sentences with a cluster, of which a process may be killed in the middle."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cluster.core.config.sections import Configuration
from cluster.wire.connection import fixed_address
from cluster.wire.generation_client import GenerationClient
from deploy.local.local_cluster import LocalCluster
from pilotfish.v1 import generation_pb2
from tests.chaos.cluster import ChaosCluster
from tests.translations.reference import Answer
from tests.translations.sentences import Sentence

TIMEOUT_SECONDS = 500.0
_POLL_SECONDS, _GLANCE_SECONDS = 0.02, 0.001


@dataclass(frozen=True)
class Plan:
    """How the sentences are translated."""

    method: str
    beams: int
    at_once: int
    most: int
    """Most tokens of a translation."""
    kill: str = ""
    """The role of the process that is killed when a third of the sentences are translated; empty: none."""


@dataclass
class Outcome:
    """The translations, and what was seen beside them."""

    answers: list[Answer] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    reasons: list[tuple[str, str]] = field(default_factory=list)
    """The kind of each process that was lost, and how the loss was noticed."""
    interrupted: int = 0
    """Translations that were begun and not ended when the process was killed."""
    with_tokens: int = 0
    """Interrupted translations of which the client already had tokens."""
    with_drafts: int = 0
    """Interrupted translations of which the client already had accepted draft tokens."""
    accepted_before: int = 0
    """Accepted draft tokens that the client had when the process was killed."""
    accepted_after: int = 0
    """Accepted draft tokens that came once a new process served."""


@dataclass
class _Progress:
    """One translation."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    accepted: int = 0
    is_begun: bool = False
    is_done: bool = False


async def translate(configuration: Configuration, plan: Plan, sentences: Sequence[Sentence], logs: Path) -> Outcome:
    """Translate all sentences, `plan.at_once` at a time. Raises `RuntimeError` if nothing could be killed in time."""
    outcome = Outcome()
    async with _cluster(configuration, plan, logs) as (client, cluster):
        running = [_Progress() for _ in sentences]
        slots, reached = asyncio.Semaphore(plan.at_once), asyncio.Event()

        async def one(sentence: Sentence, progress: _Progress) -> None:
            async with slots:
                await _translate(client, plan, sentence, progress, outcome)
            if sum(other.is_done for other in running) >= len(running) // 3:
                reached.set()

        killing = None if cluster is None else asyncio.create_task(_kill(cluster, plan, reached, running, outcome))
        await asyncio.gather(*map(one, sentences, running))
        if killing is not None and cluster is not None:
            if not outcome.interrupted:
                killing.cancel()
                raise RuntimeError("all translations ended before a process was killed")
            outcome.accepted_after = sum(progress.accepted for progress in running) - await killing
            outcome.reasons = list(cluster.replacements.reasons)
    outcome.answers = [Answer(tuple(progress.tokens), progress.text) for progress in running]
    return outcome


@asynccontextmanager
async def _cluster(
    configuration: Configuration, plan: Plan, logs: Path
) -> AsyncIterator[tuple[GenerationClient, ChaosCluster | None]]:
    """A cluster in this process, or one of processes if one of them is to be killed."""
    if not plan.kill:
        async with LocalCluster(configuration) as local:
            client = GenerationClient(fixed_address(local.grpc_address), local.access)
            yield client, None
            await client.close()
        return
    draft = configuration.draft
    drafters = int(draft.is_enabled and not draft.is_colocated)
    ranks = (configuration.target.tensor_parallel,)
    cluster = ChaosCluster(configuration, ranks, drafters, 1, logs, seed=0)
    try:
        await cluster.start()
        client = GenerationClient(fixed_address(cluster.doors[0].address))
        yield client, cluster
        await client.close()
        cluster.check()
    except Exception as error:
        error.add_note(f"lost processes: {cluster.replacements.reasons}, and at the end: {cluster.serving()}")
        error.add_note("".join((logs / "processes.log").read_text(errors="replace").splitlines(keepends=True)[-60:]))
        raise
    finally:
        await cluster.stop()


async def _translate(
    client: GenerationClient, plan: Plan, sentence: Sentence, progress: _Progress, outcome: Outcome
) -> None:
    message = generation_pb2.GenerateRequest(
        text=sentence.source, stopping=generation_pb2.StoppingCriteria(max_tokens=plan.most)
    )
    if plan.method == "prediction":
        message.prediction_text = sentence.reference
    if plan.beams > 1:
        message.best_of = plan.beams
        message.beam_search.SetInParent()
    progress.is_begun = True
    async for response in client.generate(message, TIMEOUT_SECONDS):
        progress.tokens.extend(response.delta.token_ids)
        progress.text += response.delta.text
        progress.accepted += response.delta.accepted_draft_tokens
        outcome.drafted += response.finished.usage.drafted_tokens
        outcome.accepted += response.finished.usage.accepted_draft_tokens
    progress.is_done = True


async def _kill(
    cluster: ChaosCluster, plan: Plan, reached: asyncio.Event, running: Sequence[_Progress], outcome: Outcome
) -> int:
    """Kill a process of `plan.kill` once enough translations are done, and wait until a new one serves.

    It is killed while a translation goes on. With drafts it is one of which the client has accepted draft tokens, if
    that happens before the last third. Returns how many accepted draft tokens the client had when the new process
    served.
    """
    await reached.wait()
    while not all(progress.is_done for progress in running):
        going = [progress for progress in running if progress.is_begun and not progress.is_done]
        is_late = sum(progress.is_done for progress in running) > 2 * len(running) // 3
        if any(progress.accepted or plan.method == "none" or is_late for progress in going):
            break
        await asyncio.sleep(_GLANCE_SECONDS)
    victim = next(victim for victim in cluster.victims() if victim.kind == plan.kill)
    begun = [progress for progress in running if progress.is_begun and not progress.is_done]
    victim.signal(signal.SIGKILL)
    outcome.interrupted = len(begun)
    outcome.with_tokens = sum(bool(progress.tokens) for progress in begun)
    outcome.with_drafts = sum(bool(progress.accepted) for progress in begun)
    accepted = outcome.accepted_before = sum(progress.accepted for progress in running)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        while not cluster.replacements.seconds:
            accepted = sum(progress.accepted for progress in running)
            await asyncio.sleep(_POLL_SECONDS)
            cluster.check()
    return accepted
