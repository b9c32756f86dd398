"""The baseline: `generate` of `transformers`, greedy, batched and padded on the left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.bench.client import Answer, Answers

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PAD = 0


class Generate:
    """One model, computed with the threads of this process."""

    def __init__(self, directory: Path, dtype: str) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=_DTYPES[dtype]).eval()

    def answer_all(self, prompts: Sequence[Sequence[int]], tokens: int, batch: int) -> Answers:
        """Exactly `tokens` tokens for each prompt, `batch` prompts at a time."""
        begun = time.perf_counter()
        each: list[Answer] = []
        for first in range(0, len(prompts), batch):
            each.extend(self._answer(prompts[first : first + batch], tokens))
        return Answers(each, time.perf_counter() - begun)

    @torch.inference_mode()
    def _answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answer]:
        width = max(map(len, prompts))
        asked_at = time.perf_counter()
        output = self._model.generate(
            torch.tensor([[_PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=_PAD,
        )
        return [Answer(asked_at, row[width:].tolist(), steps=tokens) for row in output]
