"""`pilotfish generate`: answer one prompt over the HTTP API, without its colours: text or JSON for scripts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from deploy.commands.client.connection import ChosenServer, InProcessOption, client_settings, connected, stream
from deploy.commands.client.marked_text import statistics
from deploy.commands.options import ConfigOption, SetOption
from deploy.implied_settings import NOT_LOSSLESS
from deploy.network.https_client import CacertOption, UrlOption
from deploy.terminal import notify, write_json, write_text

Write = Callable[[str], None]


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

    @property
    def path(self) -> str:
        """The route that answers it."""
        return "/v1/completions" if self.raw else "/v1/chat/completions"

    def body(self) -> dict[str, Any]:
        """The request of a streamed answer."""
        content = {"prompt": self.text} if self.raw else {"messages": [{"role": "user", "content": self.text}]}
        return {
            **content,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


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
    accepted_by_origin: dict[str, int] = field(default_factory=dict)
    """Where the accepted draft tokens come from: `request`, `earlier`, `trained` or `forced`."""
    target_steps: int = 0
    """Forward passes of the target that decided tokens."""
    draft_method: str = ""
    lossless: bool = True
    """Whether the answer is exactly that of the model alone."""
    seconds: float = 0.0

    def add(self, chunk: Any) -> str:
        """Take over one chunk of the stream. Returns the text that it adds."""
        self.model, self.seed = chunk.get("model", self.model), chunk.get("seed", self.seed)
        self.lossless = chunk.get("lossless", self.lossless)
        if usage := chunk.get("usage"):
            self.prompt_tokens, self.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        added = ""
        for choice in chunk["choices"]:
            added += choice.get("delta", {}).get("content") or choice.get("text") or ""
            self.token_ids.extend(choice.get("token_ids") or ())
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if receipt := choice.get("receipt"):
                self.drafted_tokens, self.accepted_draft_tokens = receipt["drafted"], receipt["accepted"]
                self.accepted_by_origin = receipt.get("accepted_by_origin", {})
                self.target_steps, self.draft_method = receipt["target_passes"], receipt["drafter"]
        self.text += added
        return added

    def __str__(self) -> str:
        """Tokens, time, steps, accepted drafts and seed, in one line."""
        receipt = {
            "target_passes": self.target_steps,
            "drafted": self.drafted_tokens,
            "accepted": self.accepted_draft_tokens,
            "accepted_by_origin": self.accepted_by_origin,
            "lossless": self.lossless,
            "seed": self.seed,
        }
        return statistics(receipt, self.completion_tokens, self.seconds)


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to answer.")],
    config: ConfigOption = None,
    assignments: SetOption = None,
    url: UrlOption = None,
    in_process: InProcessOption = False,
    cacert: CacertOption = None,
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
    settings = client_settings(config, assignments or (), url, in_process)
    request = Prompt(prompt, raw, max_tokens, temperature, seed)
    write, notice = (_discard, _discard) if as_json else (write_text, notify)
    server = ChosenServer(settings, url, in_process, cacert)
    answer = asyncio.run(answer_prompt(server, request, write, notice))
    if as_json:
        write_json(asdict(answer))


async def answer_prompt(server: ChosenServer, prompt: Prompt, write: Write, notice: Write) -> Answer:
    """Stream the answer to `write` and its statistics to `notice`, and return it.

    A stream that breaks off continues at whichever server listens there by then. Raises `PilotfishError`.
    """
    async with connected(server, notice) as client:
        begun, answer = time.perf_counter(), Answer()
        async for chunk in stream(client, prompt.path, prompt.body()):
            is_first, added = not answer.model, answer.add(chunk)
            if is_first and not answer.lossless:
                notice(NOT_LOSSLESS)
            write(added)
        answer.seconds = time.perf_counter() - begun
        write("\n")
        if answer.draft_method:  # only a server of Pilotfish says what it took
            notice(str(answer))
    return answer


def _discard(text: str) -> None:
    """Write nothing."""
