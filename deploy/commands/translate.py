"""`pilotfish translate`: translate the lines of a file, in order."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Annotated, TextIO

import typer

from cluster.core.errors import ConfigurationError, InvalidRequest
from deploy.commands.client.connection import ChosenServer, connected
from deploy.commands.options import ConfigOption, SetOption
from deploy.network.https_client import CacertOption, UrlOption
from deploy.progress import ProgressReporter
from deploy.settings import load_settings
from deploy.terminal import notices, notify, write_text
from deploy.translation.sources import read_sources
from deploy.translation.translator import RefusedText, TranslateOptions, Translation, Translator, in_order


def translate(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A text per line; with --field, a JSON object per line.")
    ],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of to stdout.")] = None,
    field: Annotated[str | None, typer.Option(metavar="NAME", help="The field of JSONL that holds the text.")] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The model: a packaged name, directory or hub id; with --url its name."),
    ] = None,
    url: UrlOption = None,
    cacert: CacertOption = None,
    beams: Annotated[int, typer.Option(help="Beams of a beam search; 1 decodes greedily.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of one translation.")] = 256,
    in_flight: Annotated[int, typer.Option(help="Most texts that are translated at once.")] = 8,
    config: ConfigOption = None,
    assignments: SetOption = None,
) -> None:
    """Translate the lines of a file, in order: pilotfish translate FILE --model opus-mt-fr-en.

    Without --url, the model is loaded in this process.
    """
    options = TranslateOptions(max_tokens, beams)
    if out is not None and out.resolve() == file.resolve():
        raise ConfigurationError("--out: needed another file than FILE, found the same")
    if in_flight < 1:
        raise InvalidRequest("in_flight", in_flight, "at least 1")
    sources = read_sources(file, field)
    chosen = [] if model is None or url is not None else [f"target.path={model}"]
    settings = load_settings(config, [*(assignments or ()), *chosen], is_client=url is not None)

    async def run() -> None:
        async with AsyncExitStack() as stack:
            server = ChosenServer(settings, url, url is None, cacert)
            client = await stack.enter_async_context(connected(server, notify))
            translator = Translator(client, str(client.base_url), options)
            await translator.choose_model(model if url is not None else None)
            file = None if out is None else stack.enter_context(_opened(out))
            report = stack.enter_context(ProgressReporter(notices, "translating"))
            await write_translations(translator, sources, in_flight, file, report)

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        notify(f"stopped; {out or 'the output'} has the translations of the first lines")
        raise


def _opened(out: Path) -> TextIO:
    try:
        return out.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--out {out}: needed a file that can be written; {error}") from None


async def write_translations(
    translator: Translator,
    sources: tuple[str, ...],
    in_flight: int,
    file: TextIO | None,
    report: ProgressReporter,
) -> None:
    """Write one line per source, in order, to a file or to stdout. Raises `RefusedText`, which names the line."""

    async def one(numbered: tuple[int, str]) -> Translation:
        number, text = numbered
        try:
            return await translator.translate(text)
        except RefusedText as error:
            raise error.of_line(number) from None

    begun, done, tokens, cut = time.perf_counter(), 0, 0, 0
    async with aclosing(in_order(list(enumerate(sources, 1)), one, in_flight)) as translations:
        async for translation in translations:
            line = " ".join(translation.text.split("\n")) + "\n"
            if file is None:
                write_text(line)
            else:
                file.write(line)
                file.flush()
            done, tokens, cut = done + 1, tokens + translation.tokens, cut + translation.is_cut
            speed = tokens / (time.perf_counter() - begun)
            report(done / len(sources), f"{done} of {len(sources)} texts, {speed:.0f} tokens/s")
    notify(f"{done} texts, {tokens} tokens in {time.perf_counter() - begun:.1f} s")
    if cut:
        notify(f"{cut} of them end because they have the most tokens; --max-tokens raises the bound")
