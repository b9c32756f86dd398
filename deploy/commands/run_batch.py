"""`pilotfish run-batch`: answer the lines of a batch file in OpenAI's format."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cluster.core.errors import ConfigurationError
from deploy.batch.run import BatchCounts, BatchRun, Report, read_lines
from deploy.commands.client.connection import ChosenServer, connected
from deploy.commands.options import ConfigOption, SetOption
from deploy.network.https_client import CacertOption, UrlOption, check_reachable
from deploy.progress import ProgressReporter
from deploy.settings import load_settings
from deploy.terminal import notices, notify

_TIMEOUT_HEADROOM_SECONDS = 5.0
"""How much longer the connection waits than the line, so that a late line is reported as such."""


def run_batch(
    input_file: Annotated[
        Path, typer.Option("--input-file", "-i", help="JSONL: custom_id, method, url and body on each line.")
    ],
    output_file: Annotated[Path, typer.Option("--output-file", "-o", help="JSONL of the answers. It is replaced.")],
    config: ConfigOption = None,
    assignments: SetOption = None,
    url: UrlOption = None,
    cacert: CacertOption = None,
    concurrency: Annotated[int, typer.Option(help="Most requests in flight.")] = 16,
    timeout: Annotated[float, typer.Option(help="Longest time of one line, in seconds.")] = 3600.0,
) -> None:
    """Answer a batch file in OpenAI's format: chat completions, completions and responses, errors line by line.

    Without --url, the models are loaded in this process. Answers are written in the order in which they end; their
    custom_id tells them apart. Ctrl-C stops and keeps those that are written. Exits with 1 if a line failed.
    """
    if concurrency < 1:
        raise ConfigurationError(f"--concurrency: {concurrency} is refused; it must be at least 1")
    if not 0 < timeout < float("inf"):
        raise ConfigurationError(f"--timeout: {timeout} is refused; it must be above 0")
    if input_file.resolve() == output_file.resolve():
        raise ConfigurationError("--output-file: needed another file than --input-file, found the same")
    next(read_lines(input_file), None)  # an unreadable file is reported before anything is loaded
    settings = load_settings(config, assignments or (), is_client=url is not None)
    counts = BatchCounts()

    async def run(report: Report) -> None:
        server = ChosenServer(settings, url, in_process=url is None, cacert=cacert)
        async with connected(server, notify, timeout + _TIMEOUT_HEADROOM_SECONDS) as client:
            if url is not None:
                await check_reachable(client)
            await BatchRun(client, concurrency, timeout, report, counts).run(input_file, output_file)

    with ProgressReporter(notices, "run-batch") as report:
        try:
            asyncio.run(run(report))
        except KeyboardInterrupt:
            notify(f"stopped; {output_file} has what ended: {counts}")
            raise
    notify(f"{counts}, in the order in which they ended: {output_file}")
    if counts.failed:
        raise typer.Exit(1)
