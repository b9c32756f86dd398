"""A short training of a module on texts that were just served, whose hidden states are in memory.

It is the training of `pilotfish distill` without files: the answers are the served texts, and the state of the module
that predicts texts best that were left out is kept. On few texts, that is often not the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad

from workers.distill.answers import Answer
from workers.distill.loop import EarlyStopping, TrainingPlan
from workers.distill.modules.learner import ModulePlan, ModuleTraining, TappedModule, measure
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.heads import MedusaHeads

LearningModule = MedusaHeads | EagleHead
"""The modules that learn from what is served."""

_SHARED = ("selector.", "output_norm")
"""Begins the names of parameters that all weights of a served draft have in common. They are not trained."""


@dataclass(frozen=True, slots=True)
class ServedText:
    """Committed tokens, and what a module reads of the target at consecutive positions of them."""

    tokens: Sequence[int]
    base_len: int
    """Tokens before the first draft. The token after them is the first one that a draft can predict."""
    first: int
    """Position of the first row of `hidden`, at most `base_len - 2`."""
    hidden: Tensor
    """[positions, taps x hidden size] Residual streams of the target."""


@dataclass(frozen=True, slots=True)
class OnlinePlan:
    """Settings of one short training."""

    steps: int
    measures: int = 5
    """States of the module that are measured, besides the first one."""
    batch_tokens: int = 512
    """Most tokens of a batch, padding included."""
    paths: int = 256
    """Paths of a batch that the loss covers, drawn at random."""
    learning_rate: float = 3e-4
    seed: int = 0


def train_online(
    module: LearningModule,
    ends: TargetEnds,
    texts: Sequence[ServedText],
    left_out: Sequence[ServedText],
    plan: OnlinePlan,
) -> None:
    """Train a module in place, by the cross entropy of the committed tokens along paths of drafted ones.

    Of the states that it passes, the one that predicts `left_out` best is kept; without any, the last one. Raises
    `ValueError` without a position to learn from.
    """
    served = _ServedTaps()
    trained, measured = (
        [answer for text in part if (answer := served.add(text)) is not None] for part in (texts, left_out)
    )
    if not trained:
        raise ValueError("texts: none has a position to learn from")
    for name, value in module.named_parameters():
        value.requires_grad_(not name.startswith(_SHARED))
    longest = max(len(answer.prompt) + len(answer.answer) for answer in (*trained, *measured))
    training = TrainingPlan(
        learning_rate=plan.learning_rate,
        weight_decay=0.0,
        batch_tokens=plan.batch_tokens,
        max_length=longest,
        seed=plan.seed,
        precision="float32",
        steps=plan.steps,
    )
    module_plan = ModulePlan(training, paths=plan.paths, optimizer="adamw")
    tapped = TappedModule(module, ends, served)

    def tokens_per_step() -> float | None:
        if not measured:
            return None
        return measure(tapped, measured, longest, module_plan.measured_depths, autocast=False).tokens_per_step

    stopping = EarlyStopping(tokens_per_step, interval=1 / plan.measures, cost=1.0, first_seconds=0.0, patience=2)
    ModuleTraining(tapped, trained, (), module_plan, None, early_stopping=stopping).run(lambda *_: None)
    module.eval().requires_grad_(False)


class _ServedTaps:
    """The hidden states of texts; see `TapSource`."""

    def __init__(self) -> None:
        self.width = 0
        self._rows: dict[str, Tensor] = {}

    def add(self, text: ServedText) -> Answer | None:
        """The text as an answer, whose hidden states are kept; `None` if it has no token that a draft can predict."""
        end = min(len(text.tokens), text.first + len(text.hidden) + 2)
        if text.base_len >= end:
            return None
        count = end - text.first
        # A path needs no hidden states of the last two positions.
        rows = pad(text.hidden[:count], (0, 0, 0, max(0, count - len(text.hidden))))
        answer = Answer(
            str(len(self._rows)),
            "",
            0.0,
            False,
            tuple(text.tokens[text.first : text.base_len - 1]),
            tuple(text.tokens[text.base_len - 1 : end]),
        )
        self._rows[answer.key], self.width = rows, rows.shape[1]
        return answer

    def has(self, answer: Answer) -> bool:
        return answer.key in self._rows

    def of(self, answer: Answer) -> Tensor:
        return self._rows[answer.key]
