"""The model card: what the draft is, what it was made of, and how well it guesses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from workers.distill.agreement import Counts, share
from workers.distill.answers import Answer
from workers.distill.checkpoints import Progress


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the card tells."""

    target: str
    target_dtype: str
    """The type the target answered in."""
    command: str
    sources: Sequence[str]
    """Names of the prompt files."""
    asks_itself: bool
    """Whether the target wrote some of the questions."""
    answers: Sequence[Answer]
    """What was trained on."""
    layers: Sequence[int]
    start: str
    """Name of the draft that was trained further; empty where there was none."""
    own_parameters: int
    guessable: int
    """Tokens that the head has rows for."""
    progress: Progress
    device: str
    held_out: Counts
    evaluation: Counts
    evaluation_name: str
    curve: str
    """File name of the loss curve."""
    notes: str


def write(facts: Facts) -> str:
    """The card, as Markdown."""
    answered = sum(len(answer.answer) for answer in facts.answers)
    progress = facts.progress
    layers = ", ".join(map(str, facts.layers))
    beginning = f"It began as layers {layers} of the target" if facts.layers else "It began at random"
    if facts.start:
        beginning += f", and was {facts.start} before"
    return f"""\
# A draft for {facts.target}

{facts.own_parameters:,} parameters of its own (bfloat16), between the embedding and the head of {facts.target}, which
are read from the target's directory. {beginning}. It guesses among {facts.guessable:,} tokens. It is of use with this
target alone, and only to guess: every token that a client reads is the target's own decision.

## How it was made

```
{facts.command}
```

Seq-KD (Kim & Rush 2016): the target itself ({facts.target_dtype}) answered the prompts, and the student learned
what the target thought at every token that it wrote.{_who_asked(facts)}

| | |
|---|---|
| answers trained on | {len(facts.answers):,}, {answered:,} tokens |
| sampled at | {_temperatures(facts.answers)} |
| prompts | {_sources(facts)} |
| training | {progress.seconds / 60:.0f} minutes on {facts.device}: {progress.step:,} steps, \
{progress.answer_tokens:,} positions, {progress.answer_tokens / max(1, answered):.1f} epochs |

{f"![Loss and agreement]({facts.curve})" if facts.curve else "No curve was drawn."}

## How well it guesses

The share of positions in the target's own greedy answers where the draft's first guess is what the target wrote next.

| answers to | agreement | positions |
|---|---|---|
{_rows("prompts held out", facts.held_out)}{_evaluation(facts)}
{_epochs(progress)}{_notes(facts)}"""


def _sources(facts: Facts) -> str:
    counts = Counter(answer.key.split(":", 1)[0] for answer in facts.answers)
    return ", ".join(f"{name} ({counts[name]:,} answers)" for name in facts.sources)


def _who_asked(facts: Facts) -> str:
    return " Where only a system message was given, it had written the question as well." if facts.asks_itself else ""


def _temperatures(answers: Sequence[Answer]) -> str:
    counts = Counter(answer.temperature for answer in answers)
    return ", ".join(f"temperature {value:g} ({counts[value]:,} answers)" for value in sorted(counts))


def _rows(name: str, counts: Counts) -> str:
    return f"| {name} | {share(counts):.1%} | {sum(total for _, total in counts.values()):,} |\n"


def _evaluation(facts: Facts) -> str:
    rows = [_rows(f"{facts.evaluation_name}: {name}", {name: counts}) for name, counts in facts.evaluation.items()]
    if len(rows) > 1:
        rows.append(_rows(f"{facts.evaluation_name}: all", facts.evaluation))
    return "".join(rows)


def _epochs(progress: Progress) -> str:
    rows = [f"| {step:,} | {seconds / 60:.1f} | {agreed:.1%} |\n" for step, seconds, agreed in progress.agreements]
    if not rows:
        return ""
    return "On held-out prompts, after each epoch:\n\n| step | minutes | agreement |\n|---|---|---|\n" + "".join(rows)


def _notes(facts: Facts) -> str:
    return f"\n{facts.notes.strip()}\n" if facts.notes.strip() else ""
