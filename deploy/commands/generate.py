"""`pilotfish generate`: answer one prompt over the public gRPC service."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer

from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError, InvalidRequest
from cluster.ingress.router.choice import CoordinatorView
from cluster.ingress.router.router import Router
from cluster.wire.address import join_host_port
from cluster.wire.generation_client import GenerationClient
from cluster.wire.peer_access import PublicAccess
from deploy.commands.options import ConfigOption, SetOption
from deploy.coordinator_server import fixed_address
from deploy.implied_settings import NOT_LOSSLESS
from deploy.settings import Settings, load_settings
from deploy.terminal import notify, output, write_text
from pilotfish.v1 import common_pb2, generation_pb2

Write = Callable[[str], None]

_CONNECT_SECONDS = 0.5
"""How long to wait for the configured server to accept a connection."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt and its generation parameters."""

    text: str
    raw: bool = False
    """Continue the text without applying the chat template."""
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int | None = None
    """Unsigned 64-bit. `None` lets the server draw one."""

    def message(self) -> generation_pb2.GenerateRequest:
        """The request for the public service. Raises `InvalidRequest` for values that protobuf cannot hold."""
        for name, value, bound in (("max_tokens", self.max_tokens, 1 << 32), ("seed", self.seed, 1 << 64)):
            if value is not None and not 0 <= value < bound:
                raise InvalidRequest(name, value, f"between 0 and {bound - 1}")
        request = generation_pb2.GenerateRequest(
            sampling=common_pb2.SamplingParameters(temperature=self.temperature, seed=self.seed),
            stopping=generation_pb2.StoppingCriteria(max_tokens=self.max_tokens),
        )
        if self.raw:
            request.text = self.text
        else:
            request.chat.messages.add(role="user", content=self.text)
        return request


@dataclass(slots=True)
class Answer:
    """A whole answer with its counts. The fields are those of `--json`."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    model: str = ""
    seed: int = 0
    finish_reason: str = ""
    """`stop`, `length` or `abort`."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    """Draft tokens that were verified."""
    accepted_draft_tokens: int = 0
    target_steps: int = 0
    """Forward passes of the target that decided tokens."""
    draft_method: str = ""
    lossless: bool = True
    """Whether the answer is exactly that of the model alone."""
    seconds: float = 0.0

    def end(self, finished: generation_pb2.GenerationFinished, seconds: float) -> None:
        """Take over the reason and the counts of the end."""
        usage = finished.usage
        name = generation_pb2.FinishReason.Name(finished.reason)
        self.finish_reason = name.removeprefix("FINISH_REASON_").lower()
        self.prompt_tokens, self.completion_tokens = usage.prompt_tokens, usage.completion_tokens
        self.drafted_tokens, self.accepted_draft_tokens = usage.drafted_tokens, usage.accepted_draft_tokens
        self.target_steps, self.draft_method, self.seconds = usage.target_steps, finished.draft_method, seconds

    def __str__(self) -> str:
        """Tokens, time, accepted drafts and seed, in one line."""
        per_step = self.completion_tokens / max(1, self.target_steps)
        return (
            f"{self.completion_tokens} tokens in {self.seconds:.1f} s "
            f"({self.completion_tokens / self.seconds:.1f} tokens/s), {self.accepted_draft_tokens} of them drafted, "
            f"{per_step:.2f} per target step, seed {self.seed}"
        )


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to answer.")],
    config: ConfigOption = None,
    assignments: SetOption = None,
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The gRPC address of a running server.")
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Load the models in this process, without Ray, for one answer.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text without applying the chat template.")] = (False),
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens in the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 always takes the most probable token.")] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Unsigned 64-bit. If unset, the server draws one and prints it.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print text, tokens, seed and counts as JSON, once the answer is complete.")
    ] = False,
) -> None:
    """Answer one prompt. Ask the running server if there is one; otherwise load the models in this process."""
    if server is not None and in_process:
        raise ConfigurationError("--server and --in-process: needed one of them, found both")
    settings = load_settings(config, assignments or ())
    request = Prompt(prompt, raw, max_tokens, temperature, seed)
    write = _discard if as_json else write_text
    answer = asyncio.run(answer_prompt(settings, request, server, in_process, write, _discard if as_json else notify))
    if as_json:
        output.print_json(json.dumps(asdict(answer)))


async def answer_prompt(
    settings: Settings, prompt: Prompt, server: str | None, in_process: bool, write: Write, notice: Write
) -> Answer:
    """Stream the answer to `write` and its statistics to `notice`, and return it.

    Without `server` or `in_process`, the configured server answers if it listens, otherwise this process.
    Raises `PilotfishError`.
    """
    prompt.message()  # refuse bad values before anything is loaded
    address = server
    if address is None and not in_process:
        address = _listening_address(settings.configuration)
        if address is None:
            notice("no server is running; loading the model in this process (`pilotfish serve` starts a server)")
    if address is not None:
        access = PublicAccess(settings.api_key, settings.configuration.server.tls)
        return await _stream(address, access, settings.configuration, prompt, write, notice)
    # Importing torch takes seconds, and a client of a running server does not need it.
    from deploy.local.local_cluster import LocalCluster
    from deploy.models import resolve_models

    models = resolve_models(settings.configuration, settings.cache_directory, lambda _: None)
    any_port = models.configuration.server.model_copy(update={"grpc_port": 0})
    async with LocalCluster(models.configuration.model_copy(update={"server": any_port})) as cluster:
        return await _stream(cluster.grpc_address, cluster.access, settings.configuration, prompt, write, notice)


async def _stream(
    address: str, access: PublicAccess, configuration: Configuration, prompt: Prompt, write: Write, notice: Write
) -> Answer:
    # A stream that breaks off continues at whichever server listens at the address by then.
    server = CoordinatorView("server", address)
    client = Router(lambda: (server,), lambda _: GenerationClient(fixed_address(address), access), patience_seconds=0.0)
    begun = time.perf_counter()
    answer = Answer()
    try:
        async for response in client.generate(prompt.message(), configuration.limits.max_timeout_seconds):
            match response.WhichOneof("event"):
                case "started":
                    answer.seed, answer.model = response.started.seed, response.started.model
                    answer.lossless = not response.lossy
                    if response.lossy:
                        notice(NOT_LOSSLESS)
                case "delta":
                    answer.text += response.delta.text
                    answer.token_ids.extend(response.delta.token_ids)
                    write(response.delta.text)
                case "finished":
                    answer.end(response.finished, time.perf_counter() - begun)
                    write("\n")
                    notice(str(answer))
    finally:
        await client.close()
    return answer


def _listening_address(configuration: Configuration) -> str | None:
    """The configured gRPC address if it accepts connections, otherwise `None`."""
    server = configuration.server
    try:
        with socket.create_connection((server.grpc_host, server.grpc_port), timeout=_CONNECT_SECONDS):
            return join_host_port(server.grpc_host, server.grpc_port)
    except OSError:
        return None


def _discard(text: str) -> None:
    """Write nothing."""
