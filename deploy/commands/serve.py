"""`pilotfish serve`: run the cluster until a signal arrives."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.core.config.public_tls import PublicTlsSection
from cluster.core.config.sections import Configuration
from cluster.core.errors import PilotfishError
from cluster.wire.address import grpc_api_address, http_api_url
from deploy.commands.options import ConfigOption, SetOption
from deploy.implied_settings import NOT_LOSSLESS
from deploy.models import ReportProgress, served_name
from deploy.network.exposure import exposure_warning
from deploy.preflight import check_files
from deploy.ray.memory_watch import watch_memory
from deploy.settings import Settings, load_settings
from deploy.signals import SIGNALLED, Interrupted, raise_on_signals, status_of, wait_for_signal
from deploy.speculative_config import from_speculative_config
from deploy.terminal import notices, output

if TYPE_CHECKING:
    from deploy.ray.serve_cluster import ServeCluster

logger = logging.getLogger(__name__)

SpeculativeOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help="The draft as vLLM's option of this name describes it. `--set` overrides it.",
    ),
]


class Console:
    """Shows people what happens: examples on stdout, notices on stderr."""

    @contextmanager
    def starting(self) -> Iterator[ReportProgress]:
        """Show the stage that the start has reached, where stderr is a terminal."""
        with notices.status("starting") as status:
            yield status.update

    def ready(self, configuration: Configuration, *, demands_keys: bool) -> None:
        """Show how to ask the server."""
        output.print(usage_examples(configuration, demands_keys=demands_keys), markup=False)

    def say(self, text: str) -> None:
        """Show a line."""
        notices.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Show a line that must not be missed."""
        notices.print(text, style="bold red", markup=False)


class Log:
    """Logs what happens, for machines."""

    @contextmanager
    def starting(self) -> Iterator[ReportProgress]:
        """Log each stage that the start reaches once."""
        seen: set[str] = set()

        def report(stage: str) -> None:
            if stage not in seen:
                seen.add(stage)
                logger.info("%s", stage)

        yield report

    def ready(self, configuration: Configuration, *, demands_keys: bool) -> None:  # noqa: ARG002 - as for people
        """Log the addresses."""
        server = configuration.server
        logger.info(
            "%s is ready at %s (HTTP) and %s (gRPC)",
            served_name(configuration),
            http_api_url(server),
            grpc_api_address(server),
        )

    def say(self, text: str) -> None:
        """Log a line."""
        logger.info("%s", text)

    def warn(self, text: str) -> None:
        """Log a warning."""
        logger.warning("%s", text)


def serve(
    config: ConfigOption = None, assignments: SetOption = None, speculative_config: SpeculativeOption = None
) -> None:
    """Start the cluster and serve until SIGTERM or Ctrl-C. Then drain and stop everything.

    With server.log_format=json, stdout has the lines of all processes on this machine, a JSON object each.
    """
    below = () if speculative_config is None else from_speculative_config(speculative_config)
    settings = load_settings(config, assignments or (), below=below)
    check_files(settings)
    raise_on_signals()
    # Importing Ray and torch takes seconds, so the settings are checked first.
    from deploy.ray.log_stream import LogStream
    from deploy.ray.serve_cluster import ServeCluster

    if settings.configuration.server.log_format == "text":
        run(settings, ServeCluster(settings, lambda _: None), Console())
        return
    with LogStream(settings.configuration.log_level, sys.stdout) as stream:
        try:
            run(settings, ServeCluster(settings, lambda _: None, stream), Log())
        except PilotfishError as error:
            logger.error("%s", error)
            raise typer.Exit(status_of(error)) from None
        except Exception:
            logger.exception("the server stops after an unexpected error")
            raise typer.Exit(1) from None


def run(settings: Settings, cluster: ServeCluster, shown: Console | Log) -> None:
    """Run a cluster until a signal arrives, drain it and stop it. A second signal stops it at once.

    Where Ray itself is lost, nothing can be served: this ends with status 1, so that whoever started it starts another.
    """
    try:
        with shown.starting() as report:
            cluster.report_to(report)
            cluster.start()
        raise_on_signals()  # starting Ray replaces the signal handlers
        shown.ready(cluster.configuration, demands_keys=settings.demands_keys)
        exposure = exposure_warning(cluster.configuration.server, demands_keys=settings.demands_keys)
        if exposure is not None:
            shown.warn(exposure)
        if not cluster.is_lossless:
            shown.say(NOT_LOSSLESS)
        if settings.ray_address is None:
            watch_memory(cluster.configuration.cluster.memory_threshold, shown.warn)
        if (lost := wait_for_signal(cluster.find_loss)) is not None:
            shown.warn(lost)
            cluster.stop_at_once()
            sys.stdout.flush()
            os._exit(1)
        shown.say("draining; a second signal stops at once")
        cluster.drain()
        cluster.stop()
    except Interrupted:
        cluster.stop_at_once()
        shown.say("stopped at once; answers that still ran may be cut off")
        # Ray's handlers at the exit of Python wait for processes that have ended.
        sys.stdout.flush()
        os._exit(SIGNALLED)
    except BaseException:
        cluster.stop()
        raise
    shown.say("stopped")


def usage_examples(configuration: Configuration, *, demands_keys: bool = False) -> str:
    """Example requests for a running cluster: a curl line, an `openai` snippet and a grpcurl line.

    Where the APIs demand keys, the requests present that of the variable `PILOTFISH_API_KEY`.
    """
    server, name = configuration.server, served_name(configuration)
    url, address = http_api_url(server), grpc_api_address(server)
    messages = [{"role": "user", "content": "Name three prime numbers."}]
    curl, grpcurl, environment = _tls_options(server.tls)
    over_http = json.dumps({"model": name, "messages": messages, "max_tokens": 64, "temperature": 0})
    over_grpc = json.dumps(
        {"chat": {"messages": messages}, "sampling": {"temperature": 0}, "stopping": {"max_tokens": 64}}
    )
    page = "" if server.page == "off" else f" Open {url}/ in a browser."
    header, imports, key = "", "", '"none"'
    if demands_keys:
        header = ' -H "Authorization: Bearer $PILOTFISH_API_KEY"'
        imports, key = "import os\n", 'os.environ["PILOTFISH_API_KEY"]'
    return f"""\
{name} is ready at {url} (HTTP) and {address} (gRPC). Ctrl-C stops it.{page}

curl{curl}{header} {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{over_http}'

{environment}{sys.executable} -c '
{imports}from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key={key})
answer = client.chat.completions.create(model="{name}", stream=True, max_tokens=64, temperature=0,
                                        messages={json.dumps(messages)})
for chunk in answer:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
'

grpcurl{grpcurl}{header} -d '{over_grpc}' {address} pilotfish.v1.GenerationService/Generate
"""


def _tls_options(tls: PublicTlsSection | None) -> tuple[str, str, str]:
    """The options of curl and grpcurl, and the environment of Python, for a server with these settings of TLS."""
    if tls is None:
        return "", " -plaintext", ""
    curl = f" --cacert {tls.trusted}"
    grpcurl = f" -cacert {tls.trusted}"
    if tls.client_pair is not None:
        certificate, key = tls.client_pair
        curl += f" --cert {certificate} --key {key}"
        grpcurl += f" -cert {certificate} -key {key}"
    return curl, grpcurl, f"SSL_CERT_FILE={tls.trusted} "
