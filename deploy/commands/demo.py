"""One answer through the whole cluster, each token marked by who wrote it first; then the same without drafts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cluster.core.config import Configuration, DraftSection
from cluster.core.errors import WorkerUnavailable
from cluster.ingress.text.tokenizer import Tokenizer
from deploy.lossless import NOT_LOSSLESS, is_lossless
from deploy.models import resolve_models, served_name
from deploy.ray.serve_cluster import ServeCluster
from deploy.settings import Settings

MAX_TOKENS = 96

# Prompt lookup guesses that the answer goes on as the prompt did. Proofreading mostly does; the corrections are
# where the target's own tokens show.
PROMPT = """\
Proofread this paragraph and write the corrected version:

the pilot fish swim ahead of the shark. it eat the leftovers of the sharks meals, and it clean the parasites \
from its skin and its mouth. the shark do not eat the pilot fish. sailors once believed that the pilot fish \
lead the shark to its food, and they telled this story in every harbour."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one commit added: the first `accepted` tokens were drafted, the rest are the target's own."""

    tokens: tuple[int, ...]
    accepted: int


@dataclass(frozen=True, slots=True)
class Run:
    """One streamed answer, measured at the client."""

    tokens: tuple[int, ...]
    first_tokens: int
    """Tokens of the first chunk."""
    steps: int
    accepted: int
    seconds: float
    """From the first chunk to the last: what decoding took."""
    first_seconds: float
    """From the request to the first chunk."""

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: the first chunk and its time belong to the prompt."""
        return (len(self.tokens) - self.first_tokens) / self.seconds if self.seconds else 0.0


class Marker:
    """Writes an answer as it comes: drafted tokens coloured, and bracketed too where colour cannot be seen."""

    def __init__(self, output: Console, tokenizer: Tokenizer) -> None:
        self._output = output
        self._stream = tokenizer.stream()
        self._bracketed = not output.is_terminal
        self._inside = False

    def write(self, chunk: Chunk) -> None:
        """One commit's tokens."""
        for position, token in enumerate(chunk.tokens):
            text = self._stream.push(token)
            if text:
                drafted = position < chunk.accepted
                self._bracket(drafted)
                self._output.print(Text(text, "bold green" if drafted else "default"), end="")

    def end(self) -> None:
        """The last character and a new line."""
        self._bracket(False)
        self._output.print(Text(self._stream.flush()))

    def _bracket(self, drafted: bool) -> None:
        if self._bracketed and drafted != self._inside:
            self._output.print(Text("[" if drafted else "]"), end="")
            self._inside = drafted


def stream_chat(url: str, model: str, timeout_seconds: float) -> Iterator[Chunk]:
    """One greedy chat answer over HTTP, a chunk per commit. Raises `WorkerUnavailable`."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPT}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stream": True,
        "return_token_ids": True,
    }
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=timeout_seconds) as response:
            if response.status_code != httpx.codes.OK:
                raise WorkerUnavailable(f"{url} answered {response.status_code}: {response.read().decode()}")
            for line in response.iter_lines():
                chunk = _chunk(line)
                if chunk is not None and chunk.tokens:
                    yield chunk
    except httpx.TransportError as error:
        raise WorkerUnavailable(f"{url} broke off: {error!r}") from None


def measure(chunks: Iterator[Chunk], hear: Callable[[Chunk], None]) -> Run:
    """Time a stream as its reader sees it."""
    begun = time.perf_counter()
    arrivals: list[float] = []
    heard: list[Chunk] = []
    for chunk in chunks:
        arrivals.append(time.perf_counter() - begun)
        heard.append(chunk)
        hear(chunk)
    if not heard:
        raise WorkerUnavailable("the answer was empty")
    return Run(
        tokens=tuple(token for chunk in heard for token in chunk.tokens),
        first_tokens=len(heard[0].tokens),
        steps=len(heard),
        accepted=sum(chunk.accepted for chunk in heard),
        seconds=arrivals[-1] - arrivals[0],
        first_seconds=arrivals[0],
    )


def run(settings: Settings, output: Console, notices: Console) -> None:
    """Start, ask, compare, stop. Raises `PilotfishError`."""
    # Nobody else comes to these doors, so any free ports will do.
    doors = settings.configuration.server.model_copy(update={"http_port": 0, "grpc_port": 0})
    # One short answer teaches the controller nothing, and guesses are what is to be seen.
    draft = settings.configuration.draft.model_copy(update={"controller": "off"})
    drafting = settings.configuration.model_copy(update={"server": doors, "draft": draft})
    settings = replace(settings, configuration=drafting)
    plain = drafting.model_copy(update={"draft": DraftSection(method="none")})
    with ExitStack() as stack:
        status = stack.enter_context(notices.status("starting"))
        cluster = stack.enter_context(ServeCluster(settings, status.update))
        tokenizer = Tokenizer.load(
            resolve_models(settings.configuration, settings.cache_directory, status.update).target
        )
        status.stop()
        output.print(Text(f"Question: {PROMPT}"))
        with_drafts = _answer(cluster, drafting, output, tokenizer)
        status.start()
        cluster.redeploy(plain)
        status.stop()
        without = _answer(cluster, plain, output, tokenizer)
        status.start()
    output.print(comparison(drafting.draft.method, with_drafts, without))
    output.print(conclusion(drafting, with_drafts, without))


def conclusion(drafting: Configuration, with_drafts: Run, without: Run) -> str:
    """What the two answers tell. Raises `WorkerUnavailable` where they must not differ and do."""
    if not is_lossless(drafting):
        return f"{NOT_LOSSLESS}."
    if with_drafts.tokens == without.tokens:
        return f"Both answers are the same {len(without.tokens)} tokens."
    if drafting.target.dtype == "float32":
        raise WorkerUnavailable("the two answers differ, which must not happen in float32: please report it")
    return "The answers differ: in half precision, logits that are nearly equal may swap places."


def comparison(method: str, with_drafts: Run, without: Run) -> Table:
    """Both runs side by side."""
    table = Table(box=SIMPLE)
    for heading in ("drafts", "tokens/s", "mean accepted length", "tokens per step", "target steps", "first token"):
        table.add_column(heading, justify="left" if heading == "drafts" else "right")
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


def _answer(cluster: ServeCluster, configuration: Configuration, output: Console, tokenizer: Tokenizer) -> Run:
    """Stream one answer to the terminal and time it."""
    drafter = configuration.draft.method
    if not is_lossless(configuration):
        output.print(f"\n{NOT_LOSSLESS}.", style="bold red")
    legend = "green" if output.is_terminal else "in brackets"
    note = f"{legend}: drafted, then accepted by the target" if drafter != "none" else "every token the target's own"
    output.print(f"\nDrafts: {drafter} ({note})\n", markup=False)
    marker = Marker(output, tokenizer)
    seconds = configuration.limits.max_timeout_seconds
    measured = measure(stream_chat(cluster.http_url, served_name(configuration), seconds), marker.write)
    marker.end()
    return measured


def _chunk(line: str) -> Chunk | None:
    """One server-sent event, if it is one that carries tokens. Raises `WorkerUnavailable` for an error event."""
    payload = line.removeprefix("data: ")
    if payload == line or payload == "[DONE]":
        return None
    event = json.loads(payload)
    if "error" in event:
        raise WorkerUnavailable(f"the answer broke off: {event['error']}")
    choice = event["choices"][0]
    return Chunk(tuple(choice.get("token_ids", ())), int(choice.get("accepted_draft_tokens", 0)))
