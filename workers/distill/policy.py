"""On-policy distillation (DistillSpec, GKD): the student writes answers, the target gives its probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from workers.distill.answers import Answer
from workers.distill.examples import Batch, make_batch
from workers.distill.student import Student


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
