"""The target's own greedy outputs, with its most probable tokens at every position: the data of Seq-KD."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.distill.answers import Leading

ALTERNATIVES = 8
"""Most probable tokens that are stored at each position."""


def decoder_start(target: Any) -> tuple[int, ...]:
    """The tokens that every answer of an encoder-decoder target begins after: its start token and a forced one."""
    settings = target.generation_config
    first = settings.decoder_start_token_id
    found = (settings.bos_token_id if first is None else first, settings.forced_bos_token_id)
    return tuple(int(token) for token in found if token is not None)


@torch.inference_mode()
def greedy_answers(
    target: Any, sources: Sequence[tuple[int, ...]], max_tokens: int, decoder_start: tuple[int, ...]
) -> list[tuple[tuple[int, ...], Leading]]:
    """Translate a batch of sources. Each answer ends with its end-of-sequence token, unless it has `max_tokens`.

    The generation settings of the target hold, apart from beams. A last token that the settings force is left out.
    """
    device = target.get_output_embeddings().weight.device
    length = max(map(len, sources))
    tokens = torch.full((len(sources), length), int(target.config.pad_token_id), device=device)
    mask = torch.zeros_like(tokens)
    for row, source in enumerate(sources):
        tokens[row, : len(source)] = torch.tensor(source, device=device)
        mask[row, : len(source)] = 1
    forced = len(decoder_start) - 1
    settings = copy.deepcopy(target.generation_config)
    settings.num_beams, settings.do_sample = 1, False
    settings.max_length, settings.max_new_tokens = None, max_tokens + forced
    settings.output_scores = settings.return_dict_in_generate = True
    written = target.generate(input_ids=tokens, attention_mask=mask, generation_config=settings)
    leading, log_probabilities = _leading(written.scores[forced:])
    ends = _end_tokens(target)
    answers = []
    for row, answer in enumerate(written.sequences[:, len(decoder_start) :].tolist()):
        count = next((place + 1 for place, token in enumerate(answer) if token in ends), len(answer))
        if count == max_tokens and target.generation_config.forced_eos_token_id is not None:
            count -= 1
        best = Leading(leading[row, :count].astype(np.int32), log_probabilities[row, :count].astype(np.float16))
        answers.append((tuple(answer[:count]), best))
    return answers


def _leading(scores: Sequence[Tensor]) -> tuple[Any, Any]:
    """The most probable tokens at each step and their log-probabilities, both [rows, steps, alternatives]."""
    found = [step.float().log_softmax(dim=-1).topk(min(ALTERNATIVES, step.shape[-1])) for step in scores]
    tokens, values = (torch.stack([getattr(step, name) for step in found], dim=1) for name in ("indices", "values"))
    unknown = values == -torch.inf
    return tokens.masked_fill(unknown, -1).cpu().numpy(), values.cpu().numpy()


def _end_tokens(target: Any) -> frozenset[int]:
    found = target.generation_config.eos_token_id
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])
