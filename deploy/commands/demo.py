"""`pilotfish demo`: stream one answer with drafts, then without, and compare the two."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.core.config.sections import Configuration
from cluster.core.errors import WorkerUnavailable
from deploy.commands.client.connection import stream
from deploy.commands.client.marked_text import ReceivedAnswer
from deploy.commands.options import ConfigOption, SetOption
from deploy.draft_origins import origins_text
from deploy.implied_settings import NOT_LOSSLESS
from deploy.models import served_name
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


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One streamed answer with the client's measurements."""

    tokens: tuple[int, ...]
    first_tokens: int
    """Number of tokens in the first chunk."""
    steps: int
    """Number of chunks: the target commits one per step."""
    accepted: int
    """Number of drafted tokens that the target accepted."""
    seconds: float
    """Decoding time in seconds, from the first chunk to the last."""
    first_seconds: float
    """Time from the request to the first chunk, in seconds."""
    accepted_by_origin: Mapping[str, int] = field(default_factory=dict)
    """Where the accepted tokens come from, as the receipt of the answer says."""

    @property
    def tokens_per_second(self) -> float:
        """Decoding rate. It leaves out the first chunk and its time, which belong to the prompt."""
        return (len(self.tokens) - self.first_tokens) / self.seconds if self.seconds else 0.0


class MarkedPrinter:
    """Prints an answer as it arrives: drafted tokens in green, or in brackets where there is no colour."""

    def __init__(self, output: Console) -> None:
        self._output = output
        self._is_open = False

    def write(self, text: str, is_drafted: bool) -> None:
        """Print a part of the answer."""
        if text:
            self._bracket(is_drafted)
            self._output.print(Text(text, "bold green" if is_drafted else "default"), end="")

    def end(self) -> None:
        """End the line."""
        self._bracket(False)
        self._output.print()

    def _bracket(self, is_drafted: bool) -> None:
        if not self._output.is_terminal and is_drafted != self._is_open:
            self._is_open = is_drafted
            self._output.print(Text("[" if is_drafted else "]"), end="")


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
        status.stop()
        output.print(Text(f"Prompt: {PROMPT}"))
        is_lossless = cluster.is_lossless
        with_drafts = _answer(cluster, drafting, output)
        status.start()
        cluster.redeploy(plain)
        status.stop()
        without = _answer(cluster, plain, output)
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


def _answer(cluster: ServeCluster, configuration: Configuration, output: Console) -> TimedAnswer:
    """Stream one greedy answer to the terminal and time it."""
    method = configuration.draft.name
    if not cluster.is_lossless:
        output.print(f"\n{NOT_LOSSLESS}.", style="bold red")
    legend = "green" if output.is_terminal else "in brackets"
    note = f"{legend}: drafted, then accepted by the target" if method != "none" else "the target writes every token"
    output.print(f"\nDrafts: {method} ({note})\n", markup=False)
    printer = MarkedPrinter(output)

    async def ask() -> TimedAnswer:
        seconds, verify = configuration.limits.max_timeout_seconds, cluster.tls or True
        async with httpx.AsyncClient(
            base_url=cluster.http_url, headers=cluster.headers, timeout=seconds, verify=verify, trust_env=False
        ) as client:
            return await timed_answer(client, served_name(configuration), printer.write)

    measured = asyncio.run(ask())
    printer.end()
    return measured


async def timed_answer(client: httpx.AsyncClient, model: str, write: Callable[[str, bool], None]) -> TimedAnswer:
    """Stream one greedy answer and time it. `write` gets each text, and whether it was drafted.

    Raises `WorkerUnavailable`, also for an empty answer.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "return_token_ids": True,
        "return_drafts": True,
    }
    received, begun = ReceivedAnswer(), time.perf_counter()
    commits: list[tuple[int, ...]] = []
    arrivals: list[float] = []
    async for chunk in stream(client, "/v1/chat/completions", body):
        received.add(chunk)
        tokens = tuple(token for choice in chunk["choices"] for token in choice.get("token_ids", ()))
        if tokens:
            commits.append(tokens)
            arrivals.append(time.perf_counter() - begun)
        for text, is_drafted in received.parts:
            write(text, is_drafted)
    if not commits or received.receipt is None:
        raise WorkerUnavailable("the answer was empty")
    return TimedAnswer(
        tokens=tuple(token for commit in commits for token in commit),
        first_tokens=len(commits[0]),
        steps=len(commits),
        accepted=received.receipt["accepted"],
        seconds=arrivals[-1] - arrivals[0],
        first_seconds=arrivals[0],
        accepted_by_origin=received.receipt["accepted_by_origin"],
    )
