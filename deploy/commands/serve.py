"""`pilotfish serve`: run the cluster until a signal arrives."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

import typer

from cluster.core.config.public_tls import PublicTlsSection
from cluster.core.config.sections import Configuration
from cluster.wire.address import http_url, join_host_port
from deploy.chosen_draft import from_speculative_config
from deploy.commands.options import ConfigOption, SetOption
from deploy.implied_settings import NOT_LOSSLESS
from deploy.models import served_name
from deploy.network.exposure import exposure_warning
from deploy.preflight import check_files
from deploy.ray.memory_watch import watch_memory
from deploy.settings import load_settings
from deploy.signals import SIGNALLED, Interrupted, raise_on_signals, wait_for_signal
from deploy.terminal import notices, output

SpeculativeOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help="The draft as vLLM's option of this name describes it. `--set` overrides it.",
    ),
]


def serve(
    config: ConfigOption = None, assignments: SetOption = None, speculative_config: SpeculativeOption = None
) -> None:
    """Start the cluster and serve until SIGTERM or Ctrl-C. Then drain and stop everything."""
    below = () if speculative_config is None else from_speculative_config(speculative_config)
    settings = load_settings(config, assignments or (), below=below)
    check_files(settings)
    raise_on_signals()
    # Importing Ray and torch takes seconds, so the settings are checked first.
    from deploy.ray.serve_cluster import ServeCluster

    cluster = ServeCluster(settings, lambda _: None)
    try:
        with notices.status("starting") as status:
            cluster.report_to(status.update)
            cluster.start()
        raise_on_signals()  # starting Ray replaces the signal handlers
        output.print(usage_examples(cluster.configuration), markup=False)
        exposure = exposure_warning(cluster.configuration.server, demands_keys=settings.demands_keys)
        if exposure is not None:
            notices.print(exposure, style="bold red", markup=False)
        if not cluster.is_lossless:
            notices.print(NOT_LOSSLESS)
        if settings.ray_address is None:
            watch_memory(lambda text: notices.print(text, style="bold red", markup=False))
        wait_for_signal()
        notices.print("draining; a second signal stops at once")
        cluster.drain()
        cluster.stop()
    except Interrupted:
        cluster.stop_at_once()
        notices.print("stopped at once; answers that still ran may be cut off")
        # Ray's handlers at the exit of Python wait for processes that have ended.
        sys.stdout.flush()
        os._exit(SIGNALLED)
    except BaseException:
        cluster.stop()
        raise
    notices.print("stopped")


def usage_examples(configuration: Configuration) -> str:
    """Example requests for a running cluster: a curl line, an `openai` snippet and a grpcurl line."""
    server, name = configuration.server, served_name(configuration)
    url = http_url(server.http_host, server.http_port, has_tls=server.tls is not None) + server.route_prefix.rstrip("/")
    address = join_host_port(server.grpc_host, server.grpc_port)
    messages = [{"role": "user", "content": "Name three prime numbers."}]
    curl, grpcurl, environment = _tls_options(server.tls)
    over_http = json.dumps({"model": name, "messages": messages, "max_tokens": 64, "temperature": 0})
    over_grpc = json.dumps(
        {"chat": {"messages": messages}, "sampling": {"temperature": 0}, "stopping": {"max_tokens": 64}}
    )
    page = "" if server.page == "off" else f" Open {url}/ in a browser."
    return f"""\
{name} is ready at {url} (HTTP) and {address} (gRPC). Ctrl-C stops it.{page}

curl{curl} {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{over_http}'

{environment}{sys.executable} -c '
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
answer = client.chat.completions.create(model="{name}", stream=True, max_tokens=64, temperature=0,
                                        messages={json.dumps(messages)})
for chunk in answer:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
'

grpcurl{grpcurl} -d '{over_grpc}' {address} pilotfish.v1.GenerationService/Generate
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
