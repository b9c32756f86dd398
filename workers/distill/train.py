"""Trains a student that is a language model of its own, on the target's answers or on its own."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from cluster.core.errors import ConfigurationError
from workers.distill.agreement import agreement, share
from workers.distill.answers import Answer
from workers.distill.checkpoints import TENSORS, Progress
from workers.distill.divergence import distillation_loss, divergence_named
from workers.distill.examples import Batch, make_batch
from workers.distill.loop import Clock, Report, TrainingLoop, TrainingPlan
from workers.distill.student import Student


class Training:
    """Trains one student. After an interruption, `run()` continues from the last checkpoint."""

    def __init__(
        self,
        student: Student,
        answers: Sequence[Answer],
        held_out: Sequence[Answer],
        plan: TrainingPlan,
        directory: Path,
        target: PreTrainedModel | None = None,
    ) -> None:
        if plan.on_policy > 0 and target is None:
            raise ConfigurationError("on_policy: needed the target, for its probabilities of the student's answers")
        self._student = student
        learner = StudentLearner(student, held_out, plan, target)
        self._loop = TrainingLoop(learner, answers, plan, directory / TENSORS)

    def run(self, report: Report, clock: Clock = time.monotonic) -> Progress:
        """Train until the plan is finished. Raises `ConfigurationError` for a checkpoint of another training."""
        self._student.train()
        return self._loop.run(report, clock)


class StudentLearner:
    """What a student learns, for the training loop."""

    def __init__(
        self, student: Student, held_out: Sequence[Answer], plan: TrainingPlan, target: PreTrainedModel | None
    ) -> None:
        self._student = student
        self._held_out = held_out
        self._plan = plan
        self._target = target
        self.vocabulary, self.identity = student.position_in_head, ""
        self.parameters: Mapping[str, nn.Parameter] = student.own_parameters()
        groups = _groups(student, plan.weight_decay)
        self.optimizers: Sequence[torch.optim.Optimizer] = (
            torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95), fused=True),
        )

    def loss(self, answers: Sequence[Answer], number: int) -> tuple[Tensor, int]:
        """The divergence from the target at the tokens of answers, and their number."""
        plan, student = self._plan, self._student
        batch = self._batch(answers, number)
        device = student.head.device
        with torch.autocast(device.type, torch.bfloat16, enabled=plan.precision == "bfloat16"):
            logits = student.logits(student.states(batch))
        rows = student.position_in_head
        leading = rows[batch.leading_tokens.clamp(min=0)].masked_fill(batch.leading_tokens < 0, -1)
        divergence = divergence_named(plan.loss, plan.overlap_weight)
        probabilities = batch.leading_log_probabilities
        loss = distillation_loss(logits, leading, probabilities, divergence, plan.rejection_weight)
        return loss, len(batch.labels)

    def _batch(self, chosen: Sequence[Answer], number: int) -> Batch:
        plan = self._plan
        device = self._student.head.device
        # On-policy batches are spread evenly over the steps.
        own = math.floor((number + 1) * plan.on_policy) > math.floor(number * plan.on_policy)
        if own and self._target is not None:
            return on_policy(self._student, self._target, chosen, plan.max_length, plan.seed + number).to(device)
        return self._student.batch(chosen, plan.max_length).to(device)

    def measure(self) -> float | None:
        """The share of held-out positions at which the student agrees with the target; `None` without any."""
        if not self._held_out:
            return None
        plan = self._plan
        counts = agreement(
            self._student, self._held_out, plan.batch_tokens, plan.max_length, plan.precision == "bfloat16"
        )
        return share(counts)


def _groups(student: Student, weight_decay: float) -> list[dict[str, object]]:
    """Optimizer groups: matrices have weight decay; gains and biases do not."""
    own = list(student.own_parameters().values())
    return [
        {"params": [value for value in own if value.dim() > 1], "weight_decay": weight_decay},
        {"params": [value for value in own if value.dim() <= 1], "weight_decay": 0.0},
    ]


@torch.no_grad()
def on_policy(
    student: Student, target: PreTrainedModel, answers: Sequence[Answer], max_length: int, seed: int
) -> Batch:
    """A batch of the answers' prompts continued by the student, with the target's whole distribution at each token.

    Each continuation has as many tokens as the answer, drawn at temperature 1 from `seed`.
    """
    generator = torch.Generator(student.head.device).manual_seed(seed)
    was_training = student.training
    student.eval()
    written = [_continue(student, answer, max_length, generator) for answer in answers]
    student.train(was_training)
    batch = make_batch(written, max_length).to(student.head.device)
    logits = target(input_ids=batch.tokens, use_cache=False).logits.flatten(0, 1)[batch.selected].float()
    all_tokens = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    return Batch(batch.tokens, batch.selected, batch.labels, all_tokens, logits.log_softmax(dim=-1))


def _continue(student: Student, answer: Answer, max_length: int, generator: torch.Generator) -> Answer:
    prompt = answer.prompt[: max_length - 1]
    tokens = torch.tensor([prompt], device=student.head.device)
    cache = DynamicCache()
    written: list[int] = []
    for _ in range(min(len(answer.answer), max_length - len(prompt))):
        output = student.module.base_model(input_ids=tokens, past_key_values=cache, use_cache=True)
        probabilities = student.logits(output.last_hidden_state[:, -1]).float().softmax(dim=-1)
        drawn = student.tokens_of(torch.multinomial(probabilities, 1, generator=generator))
        written.append(int(drawn))
        tokens = drawn
    return Answer(answer.key, answer.category, 1.0, False, prompt, tuple(written))
