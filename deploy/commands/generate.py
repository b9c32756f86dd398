"""One question to the cluster over its public gRPC service, for `pilotfish generate`."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.core.config import Configuration
from cluster.core.errors import InvalidRequest
from cluster.wire.clients import GenerationClient
from deploy.coordinator_server import fixed
from deploy.lossless import NOT_LOSSLESS
from deploy.settings import Settings
from pilotfish.v1 import common_pb2, generation_pb2

Write = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask, and how."""

    prompt: str
    raw: bool = False
    """Continue the prompt as it stands instead of answering it as a chat message."""
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None

    def message(self) -> generation_pb2.GenerateRequest:
        """As the public service takes it. Raises `InvalidRequest` for what protobuf cannot hold."""
        for field, value, bound in (("max_tokens", self.max_tokens, 1 << 32), ("seed", self.seed, 1 << 64)):
            if value is not None and not 0 <= value < bound:
                raise InvalidRequest(field, value, f"between 0 and {bound - 1}")
        request = generation_pb2.GenerateRequest(
            sampling=common_pb2.SamplingParameters(temperature=self.temperature, seed=self.seed),
            stopping=generation_pb2.StoppingCriteria(max_tokens=self.max_tokens),
        )
        if self.raw:
            request.text = self.prompt
        else:
            request.chat.messages.add(role="user", content=self.prompt)
        return request


async def ask(
    settings: Settings, question: Question, server: str | None, in_process: bool, write: Write, notice: Write
) -> None:
    """Stream the answer to `write`; say what it cost to `notice`.

    Without `server` or `in_process`, the configured server is asked if it listens, else this process loads the models.
    Raises `PilotfishError`.
    """
    question.message()  # a bad value is refused before anything is loaded
    address = server
    if address is None and not in_process:
        address = _listening(settings.configuration)
        if address is None:
            notice("no server listens; loading the model here (`pilotfish serve` keeps one up)")
    if address is not None:
        await _stream(address, settings.configuration, question, write, notice)
        return
    from deploy.local.local_cluster import LocalCluster
    from deploy.models import resolve_models

    models = resolve_models(settings.configuration, settings.cache_directory, lambda _: None)
    quiet = models.configuration.server.model_copy(update={"grpc_port": 0})
    async with LocalCluster(models.configuration.model_copy(update={"server": quiet})) as cluster:
        await _stream(cluster.grpc_address, settings.configuration, question, write, notice)


async def _stream(address: str, configuration: Configuration, question: Question, write: Write, notice: Write) -> None:
    client = GenerationClient(fixed(address))
    begun = time.perf_counter()
    seed = 0
    try:
        async for response in client.generate(question.message(), configuration.limits.max_timeout_seconds):
            match response.WhichOneof("event"):
                case "started":
                    seed = response.started.seed
                    if response.lossy:
                        notice(NOT_LOSSLESS)
                case "delta":
                    write(response.delta.text)
                case "finished":
                    write("\n")
                    notice(_cost(response.finished.usage, seed, time.perf_counter() - begun))
    finally:
        await client.close()


def _cost(usage: generation_pb2.Usage, seed: int, seconds: float) -> str:
    mean = usage.completion_tokens / max(1, usage.target_steps)
    return (
        f"{usage.completion_tokens} tokens in {seconds:.1f} s ({usage.completion_tokens / seconds:.1f} tokens/s), "
        f"{usage.accepted_draft_tokens} of them drafted, {mean:.2f} per target step, seed {seed}"
    )


def _listening(configuration: Configuration) -> str | None:
    """The configured gRPC address, if something accepts connections there."""
    server = configuration.server
    try:
        with socket.create_connection((server.grpc_host, server.grpc_port), timeout=0.5):
            return f"{server.grpc_host}:{server.grpc_port}"
    except OSError:
        return None
