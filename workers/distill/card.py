"""The model card of a draft: what it is, how it was made, and how often it agrees with its target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.core.config.target_section import TargetSection
from workers.distill.agreement import Counts, share
from workers.distill.answers import Answer
from workers.distill.checkpoints import Progress
from workers.model.dequantized import weights_in_words


@dataclass(frozen=True, slots=True)
class Facts:
    """The contents of the card."""

    target: str
    """Name of the target."""
    target_form: str
    """The data type in which the target computed the answers, and how its weights are stored."""
    command_line: str
    """The command that made the draft."""
    has_generated_questions: bool
    """Whether the target wrote some of the questions."""
    answers: Sequence[Answer]
    """The answers that were trained on."""
    layers: Sequence[int]
    """The target's layers that the draft started as; empty for random weights."""
    start: str
    """Name of the draft that was trained further; empty where there was none."""
    own_parameters: int
    """Parameters that were trained and are stored in the draft's directory."""
    draft_vocabulary_size: int
    """Tokens that the draft can propose."""
    progress: Progress
    """The state of the training at its end."""
    device: str
    """The device that the training ran on."""
    held_out: Counts
    """Agreement on the held-out prompts, by category."""
    evaluation: Counts
    """Agreement on the evaluation's prompts, by category."""
    evaluation_name: str
    """Name of the evaluation's prompt file; empty where there was none."""
    evaluation_prompts: int
    """Prompts whose answers were evaluated."""
    curve: str
    """File name of the loss curve; empty where none was drawn."""
    notes: str
    """Markdown to append."""
    has_encoder: bool = False
    """Whether the draft uses the target's encoder."""


def computed_in(target: TargetSection) -> str:
    """The data type in which a target computes, and how its weights are stored, in words."""
    found = weights_in_words(Path(target.path), target.quantization)
    return f"{target.dtype}, weights {found}" if found else target.dtype


def write(facts: Facts) -> str:
    """The card, as Markdown."""
    answer_tokens = sum(len(answer.answer) for answer in facts.answers)
    progress = facts.progress
    return f"""\
# A draft for {facts.target}

This draft proposes tokens for {facts.target} and works with no other target. Every token that a client reads is the
target's own decision. The draft has {facts.own_parameters:,} parameters of its own (bfloat16). It uses the target's
{_shared(facts)}, which are read from the target's directory. {_origin(facts)} It can propose
{facts.draft_vocabulary_size:,} different tokens.

## How it was made

```
{facts.command_line}
```

The method is Seq-KD (Kim & Rush 2016). The target (in {facts.target_form}) answered the prompts. The student learned
the target's probabilities at every token of the answers.{_question_origin(facts)}

| | |
|---|---|
| answers trained on | {len(facts.answers):,}, {answer_tokens:,} tokens |
| sampled at | {temperatures(facts.answers)} |
| prompts | {sources(facts.answers)} |
| training | {progress.seconds / 60:.0f} minutes on {facts.device}: {progress.step:,} steps, \
{progress.answer_tokens:,} positions, {progress.answer_tokens / max(1, answer_tokens):.1f} epochs |

{f"![Loss and agreement]({facts.curve})" if facts.curve else "There is no loss curve."}

## Agreement with the target

The share of positions in the target's own greedy answers at which the draft's most probable token is the target's.
{_evaluation_size(facts)}
| answers to | agreement | positions |
|---|---|---|
{_row("held-out prompts", facts.held_out)}{_evaluation(facts)}
{_epochs(progress)}{_notes(facts)}"""


def _shared(facts: Facts) -> str:
    return "encoder, embedding and head" if facts.has_encoder else "embedding and head"


def _origin(facts: Facts) -> str:
    layers = ", ".join(map(str, facts.layers))
    part = ("decoder " if facts.has_encoder else "") + ("layers" if len(facts.layers) > 1 else "layer")
    origin = f"It started as {part} {layers} of the target" if facts.layers else "It started with random weights"
    return f"{origin}, and continues the training of {facts.start}." if facts.start else f"{origin}."


def _question_origin(facts: Facts) -> str:
    if not facts.has_generated_questions:
        return ""
    return " Where a prompt was only a system message, the target also wrote the question."


def sources(answers: Sequence[Answer]) -> str:
    """The prompt files, and how many answers are to prompts of each."""
    counts = Counter(answer.key.split(":", 1)[0] for answer in answers)
    return ", ".join(f"{name} ({count:,} answers)" for name, count in sorted(counts.items()))


def temperatures(answers: Sequence[Answer]) -> str:
    """The temperatures, and how many answers were drawn at each."""
    counts = Counter(answer.temperature for answer in answers)
    return ", ".join(f"temperature {value:g} ({counts[value]:,} answers)" for value in sorted(counts))


def _row(name: str, counts: Counts) -> str:
    return f"| {name} | {share(counts):.1%} | {sum(total for _, total in counts.values()):,} |\n"


def _evaluation_size(facts: Facts) -> str:
    if not facts.evaluation_prompts:
        return ""
    return f"The target answered {facts.evaluation_prompts:,} prompts of {facts.evaluation_name}.\n"


def _evaluation(facts: Facts) -> str:
    rows = [
        _row(f"{facts.evaluation_name}: {name}" if name else facts.evaluation_name, {name: counts})
        for name, counts in facts.evaluation.items()
    ]
    if len(rows) > 1:
        rows.append(_row(f"{facts.evaluation_name}: all", facts.evaluation))
    return "".join(rows)


def _epochs(progress: Progress) -> str:
    rows = [f"| {step:,} | {seconds / 60:.1f} | {agreed:.1%} |\n" for step, seconds, agreed in progress.agreements]
    if not rows:
        return ""
    heading = "On held-out prompts, after each epoch:\n\n| step | minutes | agreement |\n|---|---|---|\n"
    return heading + "".join(rows)


def _notes(facts: Facts) -> str:
    return f"\n{facts.notes.strip()}\n" if facts.notes.strip() else ""
