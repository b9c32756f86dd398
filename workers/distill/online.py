"""A short training of a module on texts that were just served, whose hidden states are in memory.

It is the training of `pilotfish distill` without files: the answers are the served texts, and the state of the module
that predicts texts best that were left out is kept. On few texts, that is often not the last one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.nn.functional import pad

from cluster.core.errors import ConfigurationError
from workers.distill.answers import Answer, Leading
from workers.distill.dspark.module import SparkModule
from workers.distill.dspark.rows import TextRows
from workers.distill.dspark.training import BlockPlan, BlockTraining
from workers.distill.eagle3.served import train_served
from workers.distill.eagle3.training import RollOutPlan
from workers.distill.loop import EarlyStopping, TrainingPlan
from workers.distill.modules.learner import ModulePlan, ModuleTraining, TappedModule, measure
from workers.model.drafting.block import BlockDrafter
from workers.model.drafting.eagle import EagleHead
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.files import DraftingModule, with_parameters
from workers.model.drafting.heads import MedusaHeads
from workers.model.drafting.public import PublicModule
from workers.model.public_shapes import FeatureShape, MaskedBlockShape

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
    leading: Leading | None = None
    """The target's most probable tokens in the place of each of `tokens[base_len - 1:]`; `None`: these are certain."""
    failures: Collection[int] = ()
    """Positions of tokens in whose place the target rejected all that was drafted when the text was served."""


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
    blocks: int = 64
    """Blocks of a batch that the loss of a block drafter covers instead, all depths of each."""
    failure_weight: float = 2.0
    """Weight of a token in whose place all drafts were rejected when the text was served, relative to the others."""
    learning_rate: float = 3e-4
    seed: int = 0

    @property
    def report_steps(self) -> int:
        """Steps between two states that are measured."""
        return max(1, self.steps // self.measures)

    def training(self, longest: int) -> TrainingPlan:
        """The plan of a training in float32 on texts of at most `longest` tokens."""
        return TrainingPlan(
            learning_rate=self.learning_rate,
            weight_decay=0.0,
            batch_tokens=self.batch_tokens,
            max_length=longest,
            seed=self.seed,
            precision="float32",
            steps=self.steps,
        )


def train_online(
    module: DraftingModule | PublicModule,
    parameters: Mapping[str, Tensor],
    ends: TargetEnds,
    texts: Sequence[ServedText],
    left_out: Sequence[ServedText],
    plan: OnlinePlan,
) -> Mapping[str, Tensor]:
    """The parameters of a module after a training that begins with `parameters`. The module stays as it is.

    The loss is the KL divergence from the target along paths of drafted tokens, where its probabilities are known, else
    the cross entropy of the committed tokens; of a DSpark drafter and of an EAGLE-3 head it is the one of its own
    training. A token that the draft was wrong about counts `plan.failure_weight` times. Of the states that it passes,
    the one that predicts `left_out` best is kept; without any, the last one. Raises `ValueError` without a position to
    learn from, and `ConfigurationError` for a module that does not learn.
    """
    served = _ServedTaps(plan.failure_weight)
    trained, measured = (
        [answer for text in part if (answer := served.add(text)) is not None] for part in (texts, left_out)
    )
    if not trained:
        raise ValueError("texts: none has a position to learn from")
    if isinstance(module, PublicModule) and isinstance(module.shape, MaskedBlockShape):
        return _train_spark(module.shape, parameters, ends, (trained, measured), served, plan)
    if isinstance(module, PublicModule) and isinstance(module.shape, FeatureShape):
        roll_outs = RollOutPlan(
            learning_rate=plan.learning_rate,
            weight_decay=0.0,
            is_bfloat16=False,
            steps=plan.steps,
            report_steps=plan.report_steps,
            batch_tokens=plan.batch_tokens,
            seed=plan.seed,
        )
        return train_served(module.shape, parameters, ends, (trained, measured), served.of, roll_outs)
    if not isinstance(module, MedusaHeads | EagleHead | BlockDrafter):
        raise ConfigurationError(f"draft.learn: {type(module).__name__} does not learn")
    module = with_parameters(module, parameters)
    for name, value in module.named_parameters():
        value.requires_grad_(not name.startswith(_SHARED))
    longest = _longest([*trained, *measured])
    training = plan.training(longest)
    paths = plan.blocks if isinstance(module, BlockDrafter) else plan.paths
    module_plan = ModulePlan(training, paths=paths, optimizer="adamw")
    tapped = TappedModule(module, ends, served)

    def tokens_per_step() -> float | None:
        if not measured:
            return None
        return measure(tapped, measured, longest, module_plan.measured_depths, autocast=False).tokens_per_step

    stopping = EarlyStopping(tokens_per_step, interval=1 / plan.measures, cost=1.0, first_seconds=0.0, patience=2)
    # A measure in which the process stands still is not one that takes too long.
    loop = ModuleTraining(tapped, trained, (), module_plan, None, early_stopping=stopping)
    loop.run(lambda *_: None, time.process_time)
    return module.state_dict()


def _train_spark(
    shape: MaskedBlockShape,
    parameters: Mapping[str, Tensor],
    ends: TargetEnds,
    texts: tuple[Sequence[Answer], Sequence[Answer]],
    served: _ServedTaps,
    plan: OnlinePlan,
) -> Mapping[str, Tensor]:
    """The parameters of a DSpark drafter after a training; `texts` are those to train and to measure on."""
    longest = _longest([*texts[0], *texts[1]])
    trained, *measured = (TextRows.shown(part, served.of, length=longest) for part in texts if part)
    rows = max(1, plan.batch_tokens // longest)
    spark = SparkModule(shape, ends.embedding, trained.tap_scale())
    spark.load(parameters)
    block_plan = BlockPlan(
        learning_rate=plan.learning_rate,
        is_bfloat16=False,
        steps=plan.steps,
        report_steps=plan.report_steps,
        rows=rows,
        blocks=min(longest, max(2, plan.blocks // rows)),
        trees=(),
        seed=plan.seed,
    )
    training = BlockTraining(ends.head, spark, block_plan, vocabulary=ends.vocabulary)
    if measured:
        training.run_to_best(trained, *measured)
    else:
        training.run(trained, lambda _: None, math.inf)
    return spark.weights().tensors


def _longest(answers: Sequence[Answer]) -> int:
    return max(len(answer.prompt) + len(answer.answer) for answer in answers)


class _ServedTaps:
    """The hidden states of texts; see `TapSource`."""

    def __init__(self, failure_weight: float) -> None:
        self._failure_weight = failure_weight
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
        written = text.base_len - 1
        has_failed = np.isin(np.arange(written, end), list(text.failures))
        answer = Answer(
            str(len(self._rows)),
            "",
            0.0,
            False,
            tuple(text.tokens[text.first : written]),
            tuple(text.tokens[written:end]),
            text.leading,
            weights=np.where(has_failed, self._failure_weight, 1.0).astype(np.float32),
        )
        self._rows[answer.key], self.width = rows, rows.shape[1]
        return answer

    def has(self, answer: Answer) -> bool:
        return answer.key in self._rows

    def of(self, answer: Answer) -> Tensor:
        return self._rows[answer.key]
