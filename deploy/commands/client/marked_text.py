"""Writes a streamed answer to a terminal, with its drafted tokens marked, and counts its passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from deploy.draft_origins import origins_text

DRAFTED_STYLE = "green"


@dataclass(slots=True)
class ReceivedAnswer:
    """A streamed answer, as far as it has arrived."""

    text: str = ""
    seed: int | None = None
    receipt: dict[str, Any] | None = None
    tokens: int = 0
    parts: list[tuple[str, bool]] = field(default_factory=list)
    """The texts that the last chunk added, and whether a drafter wrote each first."""

    def add(self, chunk: Any) -> None:
        """Add one chunk of `/v1/chat/completions` or `/v1/completions` with `return_drafts`."""
        self.seed = chunk.get("seed", self.seed)
        self.parts = []
        for choice in chunk["choices"]:
            content = choice.get("delta", choice).get("content" if "delta" in choice else "text") or ""
            self.text += content
            self.receipt = choice.get("receipt", self.receipt)
            self._add_parts(choice, content)

    def _add_parts(self, choice: Any, content: str) -> None:
        texts = choice.get("token_texts", [])
        self.tokens += len(texts)
        if "".join(texts) != content:  # reasoning and calls of tools are not content
            self.parts.append((content, False))
            return
        drafted = [
            place < len(draft["accepted"])
            for draft in choice.get("drafts", [])
            for place in range(draft["committed_tokens"])
        ]
        self.parts.extend(zip(texts, drafted, strict=True))


def write_parts(console: Console, answer: ReceivedAnswer) -> None:
    """Write what the last chunk added: drafted tokens in green on a terminal, the text exactly as it is elsewhere.

    On a terminal, tabs become spaces, and characters that would move its cursor back or ring its bell are left out.
    """
    for text, is_drafted in answer.parts:
        if console.is_terminal:
            console.print(Text(text, DRAFTED_STYLE if is_drafted else ""), end="")
        else:
            console.file.write(text)
            console.file.flush()


def statistics(receipt: dict[str, Any], tokens: int, seconds: float) -> str:
    """One line about an answer: tokens, rate, steps of the target, accepted drafts, seed."""
    passes, drafted, accepted = receipt["target_passes"], receipt["drafted"], receipt["accepted"]
    share = f"{accepted} of {drafted} drafted tokens accepted" if drafted else "no drafts"
    origins = origins_text(receipt.get("accepted_by_origin") or {})
    share += f" ({origins})" if origins else ""
    rate = tokens / seconds if seconds else 0.0
    lossless = "" if receipt["lossless"] else ", NOT lossless"
    return (
        f"{tokens} tokens in {seconds:.1f} s ({rate:.1f} tokens/s), {passes} target steps "
        f"({tokens / max(1, passes):.2f} tokens/step), {share}, seed {receipt['seed']}{lossless}"
    )
