"""`pilotfish demo`: stream one answer with drafts, then without, and compare the two."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.core.config.sections import Configuration
from cluster.core.errors import WorkerUnavailable
from cluster.generation.text.tokenizer import Tokenizer
from deploy.commands.options import ConfigOption, SetOption
from deploy.commands.streamed_answer import MarkedPrinter, TimedAnswer, measure, stream_chat
from deploy.draft_origins import origins_text
from deploy.implied_settings import NOT_LOSSLESS
from deploy.models import resolve_models, served_name
from deploy.settings import Settings, load_settings
from deploy.signals import raise_on_signals
from deploy.terminal import notices, output

if TYPE_CHECKING:
    from deploy.ray.serve_cluster import ServeCluster

MAX_TOKENS = 96

# Prompt lookup drafts the tokens that followed the same words in the prompt. A corrected text repeats most of its
# prompt, so most drafts are accepted. The target generates the corrections.
PROMPT = """\
Proofread this paragraph and write the corrected version:

the pilot fish swim ahead of the shark. it eat the leftovers of the sharks meals, and it clean the parasites \
from its skin and its mouth. the shark do not eat the pilot fish. sailors once believed that the pilot fish \
lead the shark to its food, and they telled this story in every harbour."""


def demo(config: ConfigOption = None, assignments: SetOption = None) -> None:
    """Stream one answer and mark its drafted tokens. Then decode it again without drafts and compare."""
    settings = load_settings(config, assignments or ())
    raise_on_signals()
    run(settings, output, notices)


def run(settings: Settings, output: Console, notices: Console) -> None:
    """Start the cluster, stream both answers, print the comparison, stop. Raises `PilotfishError`."""
    # Importing Ray takes seconds, so the settings are checked first.
    from deploy.ray.serve_cluster import ServeCluster

    drafting = _demo_configuration(settings.configuration)
    plain = drafting.model_copy(update={"draft": drafting.draft.disabled()})
    with ExitStack() as stack:
        status = stack.enter_context(notices.status("starting"))
        started = replace(settings, configuration=drafting)
        cluster = stack.enter_context(ServeCluster(started, status.update))
        tokenizer = Tokenizer.load(resolve_models(drafting, settings.cache_directory, status.update).target)
        status.stop()
        output.print(Text(f"Prompt: {PROMPT}"))
        is_lossless = cluster.is_lossless
        with_drafts = _answer(cluster, drafting, output, tokenizer)
        status.start()
        cluster.redeploy(plain)
        status.stop()
        without = _answer(cluster, plain, output, tokenizer)
        status.start()
    output.print(comparison(drafting.draft.name, with_drafts, without))
    if origins := origins_text(with_drafts.accepted_by_origin):
        output.print(f"Accepted drafts: {origins}.", markup=False)
    output.print(conclusion(drafting.target.dtype, is_lossless, with_drafts, without))


def conclusion(dtype: str, is_lossless: bool, with_drafts: TimedAnswer, without: TimedAnswer) -> str:
    """One sentence about the two answers. Raises `WorkerUnavailable` if they differ and must not.

    `is_lossless` is the target's report about the answer with drafts.
    """
    if not is_lossless:
        return f"{NOT_LOSSLESS}."
    if with_drafts.tokens == without.tokens:
        return f"Both answers are the same {len(without.tokens)} tokens."
    if dtype == "float32":
        raise WorkerUnavailable("the two answers differ, which must not happen in float32: please report it")
    return "The answers differ: in half precision, rounding may swap two nearly equal logits."


def comparison(method: str, with_drafts: TimedAnswer, without: TimedAnswer) -> Table:
    """A table with the measurements of both answers."""
    table = Table(box=SIMPLE)
    for heading in ("drafts", "tokens/s", "mean accepted length", "tokens per step", "target steps", "first token"):
        is_name = heading == "drafts"
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    for name, measured in ((method, with_drafts), ("none", without)):
        table.add_row(
            name,
            f"{measured.tokens_per_second:.1f}",
            f"{measured.accepted / measured.steps:.2f}",
            f"{len(measured.tokens) / measured.steps:.2f}",
            str(measured.steps),
            f"{measured.first_seconds:.2f} s",
        )
    return table


def _demo_configuration(configuration: Configuration) -> Configuration:
    """The configuration with free ports and with drafts in every round.

    The speculation controller is off, because one short answer is too short for it to learn from.
    """
    server = configuration.server.model_copy(update={"http_port": 0, "grpc_port": 0})
    draft = configuration.draft.model_copy(update={"controller": "off"})
    return configuration.model_copy(update={"server": server, "draft": draft})


def _answer(cluster: ServeCluster, configuration: Configuration, output: Console, tokenizer: Tokenizer) -> TimedAnswer:
    """Stream one greedy answer to the terminal and time it."""
    method = configuration.draft.name
    if not cluster.is_lossless:
        output.print(f"\n{NOT_LOSSLESS}.", style="bold red")
    legend = "green" if output.is_terminal else "in brackets"
    note = f"{legend}: drafted, then accepted by the target" if method != "none" else "the target writes every token"
    output.print(f"\nDrafts: {method} ({note})\n", markup=False)
    body = {
        "model": served_name(configuration),
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "return_token_ids": True,
    }
    printer = MarkedPrinter(output, tokenizer)
    chunks = stream_chat(cluster.http_url, body, configuration.limits.max_timeout_seconds, cluster.headers, cluster.tls)
    measured = measure(chunks, printer.write)
    printer.end()
    return measured
