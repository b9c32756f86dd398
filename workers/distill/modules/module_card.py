"""The model card of a drafting module: what it is, how it was made, and its measured tokens per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from workers.distill.answers import Answer
from workers.distill.card import sources, temperatures
from workers.distill.checkpoints import Progress
from workers.distill.job import ServedTokens
from workers.distill.modules.learner import Acceptance
from workers.model.draft_card import CARD, DraftCard
from workers.model.draft_shapes import SHAPES


@dataclass(frozen=True, slots=True)
class ModuleFacts:
    """The contents of the card."""

    card: DraftCard
    target_form: str
    """The data type in which the target computed the answers, and how its weights are stored."""
    command_line: str
    answers: Sequence[Answer]
    """The answers that were trained on."""
    start: str
    """What the module started as; empty for random weights."""
    obstacle: str
    """What keeps the module out of every public format, as a clause; empty if it is stored in one."""
    parameters: int
    progress: Progress
    device: str
    measured: Mapping[str, Acceptance]
    """How many tokens of a greedy chain are right, by the kind of answers."""
    served: Mapping[str, ServedTokens]
    """What the engine measured, by the kind of prompts."""
    serving: str
    """The settings of the measurement, in words."""
    curve: str
    """File name of the learning curve; empty where none was drawn."""
    notes: str
    """Markdown to append."""


def write_card(facts: ModuleFacts) -> str:
    """The card, as Markdown."""
    card, progress = facts.card, facts.progress
    tokens = sum(len(answer.answer) for answer in facts.answers)
    taps = f" It reads the target's hidden states after {', '.join(map(str, card.taps))} layers." if card.taps else ""
    size = "" if card.vocabulary_size is None else f" It can propose {card.vocabulary_size:,} different tokens."
    lines = [
        f"# A draft for {card.target}\n",
        f"The kind is `{card.kind}`: {SHAPES[card.kind].meaning}. It proposes tokens for {card.target} and works with "
        f"no other target. Every token that a client reads is the target's own decision. The draft has "
        f"{facts.parameters:,} parameters of its own; embedding, head and any final norm are the target's.{taps}{size}"
        + (f" It started as {facts.start}." if facts.start else ""),
        "\n## How it was made\n",
        f"```\n{facts.command_line}\n```\n",
        "| | |\n|---|---|",
        f"| answers of the target (in {facts.target_form}) | {len(facts.answers):,}, {tokens:,} tokens |",
        f"| sampled at | {temperatures(facts.answers)} |",
        f"| prompts | {sources(facts.answers)} |",
    ]
    if progress.step:
        lines.append(
            f"| training | {progress.seconds / 60:.0f} minutes on {facts.device}: {progress.step:,} steps, "
            f"{progress.answer_tokens:,} paths, {progress.epoch + 1} epochs begun |"
        )
    if facts.curve:
        lines.append(f"\n![Loss and tokens per step]({facts.curve})")
    lines += ["\n## Format\n", _format(facts), *_served(facts)]
    if facts.measured:
        lines += [
            "\n## Accepted part of a chain\n",
            "From the text of the target's own greedy answers, without trees: how often the first tokens of a greedy "
            "chain are all right.\n",
            "| answers to | first token | first two | first three | positions |",
            "|---|---|---|---|---|",
            *(_row(name, found) for name, found in facts.measured.items()),
        ]
    if facts.notes.strip():
        lines.append(f"\n{facts.notes.strip()}")
    return "\n".join(lines) + "\n"


def _format(facts: ModuleFacts) -> str:
    if not facts.obstacle:
        return "Medusa heads in the layout of vLLM's converter: `config.json` and `model.safetensors` say all of it."
    own = f"Pilotfish's own, with `{CARD}` in `config.json`."
    return f"{own} No public format says what it computes: {facts.obstacle}."


def _served(facts: ModuleFacts) -> list[str]:
    if not facts.served:
        return []
    lines = [
        "\n## Measured tokens per step\n",
        f"Tokens that one step of the target adds to an answer, in a cluster that serves the draft: {facts.serving}.\n",
        "| prompts | tokens per step | answers | tokens |",
        "|---|---|---|---|",
        *(
            f"| {name} | {found.tokens_per_step:.2f} | {found.prompts} | {found.tokens:,} |"
            for name, found in facts.served.items()
        ),
    ]
    curve = facts.progress.served
    if not curve:
        return lines
    best = max(entry[-1] for entry in curve)
    lines += [
        "\nDuring the training, on the held-out prompts. The best of these states is the draft.\n",
        "| minutes | positions trained on | loss | tokens per step |",
        "|---|---|---|---|",
    ]
    for step, seconds, positions, value in curve:
        loss = next((found for at, _, found in reversed(facts.progress.losses) if at <= step), None)
        marked = f"**{value:.2f}**" if value == best else f"{value:.2f}"
        lines.append(f"| {seconds / 60:.1f} | {positions:,} | {'–' if loss is None else f'{loss:.3f}'} | {marked} |")
    return lines


def _row(name: str, found: Acceptance) -> str:
    shares = [f"{found.reached[depth] / found.paths:.1%}" if depth < len(found.reached) else "–" for depth in range(3)]
    return f"| {name} | {' | '.join(shares)} | {found.paths:,} |"
