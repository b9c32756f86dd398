"""The state of `pilotfish chat`: messages, parameters, and the commands that change them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cluster.core.errors import InvalidRequest

HELP = """\
/help lists the commands.
/speculation on|off   whether drafts are verified; the text is the same
/seed N|draw          the seed of the next answers, or one drawn for each
/temperature X        0 always takes the most probable token
/tokens N             most tokens of an answer
/system TEXT          begin a new conversation with a system message
/new                  begin a new conversation
/receipt              the receipt of the last answer
/verify               ask whether the model writes exactly the last answer
/exit                 end"""


@dataclass(slots=True)
class Conversation:
    """Messages and parameters. `ask` and `answered` add messages; `command` changes parameters."""

    model: str | None = None
    max_tokens: int = 512
    temperature: float = 0.7
    seed: int | None = None
    speculation: bool = True
    has_ended: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    bundle: dict[str, Any] | None = None
    """Request, receipt and text of the last answer, as `/v1/verify` takes them."""

    def begin(self, system: str = "") -> None:
        """Begin a new conversation, with a system message if there is one."""
        self.messages = [{"role": "system", "content": system}] if system else []
        self.bundle = None

    def ask(self, text: str) -> dict[str, Any]:
        """Return the request for an answer to `text`."""
        body: dict[str, Any] = {
            "messages": [*self.messages, {"role": "user", "content": text}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "speculation": {"enabled": self.speculation},
        }
        optional = {"model": self.model, "seed": self.seed}
        return body | {name: value for name, value in optional.items() if value is not None}

    def answered(self, body: dict[str, Any], text: str, receipt: dict[str, Any] | None) -> None:
        """Add the request's message and its answer."""
        self.messages = [*body["messages"], {"role": "assistant", "content": text}]
        self.bundle = None if receipt is None else {"request": body, "receipt": receipt, "text": text}

    def command(self, line: str) -> str:
        """Carry out a command that needs no server. Returns what to say about it. Raises `InvalidRequest`."""
        name, _, value = line.partition(" ")
        value = value.strip()
        match name:
            case "/help":
                return HELP
            case "/exit" | "/quit":
                self.has_ended = True
                return "end"
            case "/new" | "/system":
                self.begin(value)
                return "a new conversation"
            case "/speculation":
                self.speculation = _one_of(name, value, {"on": True, "off": False})
            case "/seed":
                self.seed = None if value == "draw" else _integer(name, value, 0, (1 << 64) - 1)
            case "/tokens":
                self.max_tokens = _integer(name, value, 1, (1 << 32) - 1)
            case "/temperature":
                self.temperature = _number(name, value)
            case _:
                raise InvalidRequest("command", name, "one of those that /help lists")
        return f"{name[1:]} {value}"


def _one_of(name: str, value: str, values: dict[str, bool]) -> bool:
    if value not in values:
        raise InvalidRequest(name, value, " or ".join(values))
    return values[value]


def _integer(name: str, value: str, least: int, most: int) -> int:
    if not value.isascii() or not value.isdecimal() or not least <= int(value) <= most:
        raise InvalidRequest(name, value, f"between {least} and {most}")
    return int(value)


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise InvalidRequest(name, value, "a number of at least 0")
    return number
