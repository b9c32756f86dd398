"""A short training of a draft model on texts that were just served.

It is the training of `pilotfish distill` without files: the answers are the served texts, and the state of the layers
that predicts texts best that were left out is kept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from workers.distill.agreement import agreement, share
from workers.distill.answers import Answer
from workers.distill.examples import Batch
from workers.distill.loop import EarlyStopping, TrainingLoop
from workers.distill.online import OnlinePlan, ServedText
from workers.distill.student import Student
from workers.distill.target_model import load_target
from workers.distill.train import StudentLearner
from workers.model.decoder_copies import own_parameters
from workers.model.distilled import load_distilled_draft
from workers.model.draft_card import is_distilled
from workers.model.target_ends import read_config

_PROMPT = 128
"""Most tokens of a prompt, the last ones, that a training reads."""
_CPU = torch.device("cpu")


class ServedStudent(Student):
    """A draft model whose layers are trained further, in float32. Its embedding and its head stay as they are.

    Its whole pass computes the logits, so that they have what its family does behind the head, such as a soft cap.
    """

    def __init__(self, module: PreTrainedModel, vocabulary: Tensor | None) -> None:
        """`vocabulary` are the tokens of the head's rows, int64 [rows], ascending; `None` means all tokens."""
        super().__init__(module, module.get_output_embeddings().weight.detach(), None, vocabulary, ())
        module.requires_grad_(False)
        for value in own_parameters(module).values():
            value.requires_grad_(True)
        self.eval()  # as it drafts: without dropout

    def states(self, batch: Batch) -> Tensor:
        """The logits [positions, draft vocabulary] at the positions of a batch that are trained on."""
        logits: Tensor = self.module(input_ids=batch.tokens, use_cache=False).logits
        return logits.flatten(0, 1)[batch.selected]

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits that `states` returns."""
        return hidden


def load_served_student(directory: Path, target: Path) -> ServedStudent:
    """Read a draft model, distilled or not, to train it on a CPU. Raises `ModelLoadError`."""
    if not is_distilled(directory):
        return ServedStudent(load_target(directory, _CPU), None)
    draft = load_distilled_draft(directory, target, read_config(directory), torch.float32, _CPU, "sdpa")
    return ServedStudent(draft.module, draft.vocabulary)


def train_model_online(
    student: ServedStudent,
    parameters: Mapping[str, Tensor],
    texts: Sequence[ServedText],
    left_out: Sequence[ServedText],
    plan: OnlinePlan,
) -> Mapping[str, Tensor]:
    """The parameters of a draft model after a training that begins with `parameters`. They are the student's own then.

    The loss is the cross entropy of the committed tokens of answers, each after the committed ones before it. A text is
    cut to the last 128 tokens of its prompt and, with these, to `plan.batch_tokens`. Of the states that the training
    passes, the one whose most probable tokens are those of `left_out` most often is kept; without any, the last one.
    """
    trained, measured = ([_answer(text, plan.batch_tokens) for text in part] for part in (texts, left_out))
    own = student.own_parameters()
    with torch.no_grad():
        for name, value in parameters.items():
            own[name].copy_(value)
    longest = max(len(answer.prompt) + len(answer.answer) for answer in (*trained, *measured))
    training = plan.training(longest)

    def agreed() -> float | None:
        return share(agreement(student, measured, plan.batch_tokens, longest, autocast=False)) if measured else None

    stopping = EarlyStopping(agreed, interval=1 / plan.measures, cost=1.0, first_seconds=0.0, patience=2)
    learner = StudentLearner(student, (), training, None)
    # A measure in which the process stands still is not one that takes too long.
    TrainingLoop(learner, trained, training, None, early_stopping=stopping).run(lambda *_: None, time.process_time)
    return {name: value.detach() for name, value in own.items()}


def _answer(text: ServedText, most: int) -> Answer:
    """The text as an answer of at most `most` tokens with the end of its prompt."""
    end_of_prompt = text.base_len - 1
    first = max(0, end_of_prompt - _PROMPT)
    prompt, answer = text.tokens[first:end_of_prompt], text.tokens[end_of_prompt : first + most]
    return Answer("", "", 0.0, False, tuple(prompt), tuple(answer))
