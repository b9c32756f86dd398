"""The command line. One clear line per error; exit code 2 when the operator can mend it, 1 otherwise.

Ray and torch take seconds to import: each command imports them once its settings are known to be good.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from importlib.metadata import version
from types import FrameType
from typing import Annotated, NoReturn

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from cluster.core.config import Configuration
from cluster.core.errors import ConfigurationError, InvalidRequest, PilotfishError
from deploy.commands.distill import distill
from deploy.lossless import NOT_LOSSLESS, is_lossless
from deploy.placement import Placement, Resources
from deploy.settings import read

cli = typer.Typer(
    name="pilotfish",
    help="Small draft models swim ahead of a large language model; what you read is what the large one writes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

output = Console(highlight=False, soft_wrap=True)
notices = Console(stderr=True, highlight=False, soft_wrap=True)

ConfigOption = Annotated[
    str | None, typer.Option("--config", metavar="FILE", help="A YAML file, or a preset: cpu (the default), gpu.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; may be repeated.")
]


class Interrupted(BaseException):
    """A signal asked us to stop; raised where the main thread is."""


def main() -> NoReturn:
    """The console script."""
    try:
        cli(standalone_mode=True)
    except PilotfishError as error:
        for line in str(error).splitlines():
            notices.print(f"pilotfish: {line}", markup=False)
        sys.exit(2 if isinstance(error, ConfigurationError | InvalidRequest) else 1)
    except (Interrupted, KeyboardInterrupt):
        sys.exit(130)
    sys.exit(0)


def _print_version(wanted: bool) -> None:
    if wanted:
        output.print(f"pilotfish {version('pilotfish')}")
        raise typer.Exit


@cli.callback()
def options(
    version_wanted: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""


@cli.command("plan")
def plan_command(config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Print the placement that `serve` would make, touching nothing."""
    from deploy.machine import local_resources
    from deploy.placement import plan
    from deploy.preflight import capacity_problems

    configuration = read(config, assignments or ()).configuration
    resources = local_resources()
    placement = plan(configuration, resources)
    output.print(placement_table(configuration, placement, resources))
    for problem in capacity_problems(placement, resources):
        output.print(f"would not start: {problem}", markup=False)


@cli.command()
def prepare(config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Fetch or convert the models into the cache, starting nothing."""
    settings = read(config, assignments or ())
    from deploy.models import resolve_models

    with notices.status("looking") as status:
        models = resolve_models(settings.configuration, settings.cache_directory, status.update)
    for name, directory in (("target", models.target), ("draft", models.draft)):
        if directory is not None:
            output.print(f"{name}: {directory}", markup=False)


@cli.command()
def serve(config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Start the cluster and keep it up until SIGTERM or Ctrl-C, then drain and stop everything."""
    settings = read(config, assignments or ())
    raise_on_signals()
    from deploy.ray.serve_cluster import ServeCluster

    with notices.status("starting") as status:
        cluster = ServeCluster(settings, status.update)
        cluster.start()
    try:
        raise_on_signals()  # Ray has put its own in their place
        output.print(how_to_ask(cluster.configuration), markup=False)
        if not is_lossless(cluster.configuration):
            notices.print(NOT_LOSSLESS)
        wait_for_signal()
        notices.print("draining; a second signal stops at once")
        cluster.drain()
    finally:
        cluster.stop()
    notices.print("stopped")


@cli.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model.")],
    config: ConfigOption = None,
    assignments: SetOption = None,
    server: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The gRPC address of a running server.")
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Load the models here, without Ray, for this one answer.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it stands: no chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token each time.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Unsigned 64-bit; unset draws one and tells it.")] = None,
) -> None:
    """Answer one prompt, from the running server where one listens, else in this process."""
    if server is not None and in_process:
        raise ConfigurationError("--server and --in-process: needed one of them, found both")
    settings = read(config, assignments or ())
    from deploy.commands import generate

    request = generate.Question(prompt, raw, max_tokens, temperature, seed)
    asyncio.run(generate.ask(settings, request, server, in_process, _write, _notice))


@cli.command()
def demo(config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Stream one answer through the whole cluster, marked by who wrote what, then compare with plain decoding."""
    settings = read(config, assignments or ())
    raise_on_signals()
    from deploy.commands.demo import run

    run(settings, output, notices)


cli.command()(distill)


def placement_table(configuration: Configuration, placement: Placement, resources: Resources) -> Table:
    """The placement as a table."""
    table = Table(
        title=f"Placement on {resources.cpus:g} cores and {resources.gpus} GPUs", title_justify="left", box=SIMPLE
    )
    for heading in ("role", "process", "device", "CPU", "GPU", "threads", "what"):
        numeric = heading in ("CPU", "GPU", "threads")
        table.add_column(heading, justify="right" if numeric else "left", overflow="fold")
    what = {
        "target": f"{configuration.target.path} ({configuration.target.dtype})",
        "draft": configuration.draft.method
        + (f": {configuration.draft.model.path}" if configuration.draft.model is not None else ""),
        "coordinator": f"gRPC {configuration.server.grpc_host}:{configuration.server.grpc_port}",
        "ingress": f"HTTP {configuration.server.http_host}:{configuration.server.http_port}",
    }
    for role in placement.roles:
        for rank, bundle in enumerate(role.bundles):
            process = f"rank {rank} of {len(role.bundles)}" if role.role == "target" else "replica"
            table.add_row(
                role.role,
                process,
                role.device,
                f"{bundle.cpus:g}",
                str(bundle.gpus),
                str(role.threads),
                what[role.role],
            )
    return table


def how_to_ask(configuration: Configuration) -> str:
    """A curl line, an `openai` snippet and a grpcurl line that work as printed."""
    from deploy.models import served_name

    server, name = configuration.server, served_name(configuration)
    url, address = f"http://{server.http_host}:{server.http_port}", f"{server.grpc_host}:{server.grpc_port}"
    messages = [{"role": "user", "content": "Name three things that swim."}]
    over_http = json.dumps({"model": name, "messages": messages, "max_tokens": 64, "temperature": 0})
    over_grpc = json.dumps(
        {"chat": {"messages": messages}, "sampling": {"temperature": 0}, "stopping": {"max_tokens": 64}}
    )
    return f"""\
{name} is ready at {url} (HTTP) and {address} (gRPC). Ctrl-C stops it.

curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{over_http}'

{sys.executable} -c '
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
answer = client.chat.completions.create(model="{name}", stream=True, max_tokens=64, temperature=0,
                                        messages={json.dumps(messages)})
for chunk in answer:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
'

grpcurl -plaintext -d '{over_grpc}' {address} pilotfish.v1.GenerationService/Generate
"""


def raise_on_signals() -> None:
    """SIGTERM and Ctrl-C raise `Interrupted` in the main thread, wherever it is."""

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature signals have
        raise Interrupted(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)


def wait_for_signal() -> None:
    """Return at the first SIGTERM or Ctrl-C."""
    try:
        while True:
            signal.pause()
    except Interrupted:
        return


def _write(text: str) -> None:
    """Part of an answer, as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _notice(text: str) -> None:
    notices.print(text, markup=False)


if __name__ == "__main__":
    main()
