"""Decoding methods of `transformers` on the same prompts: plain, prompt lookup, and assisted by the same draft model.

They run with the target's dtype and with as many threads as the cluster in this process, which is idle meanwhile. The
models have the type `Any`, because the annotations of `transformers` do not cover what is called here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, set_seed

from cluster.core.config.sections import Configuration
from cluster.core.errors import ModelLoadError, WorkerUnavailable
from deploy.bench.contestants.answers import Arrival, BenchAnswer, BenchPass, PassRequest, RequestOptions
from workers.forward.attention import register
from workers.model.complete_weights import load_complete
from workers.model.distilled import load_distilled_draft
from workers.model.draft_card import is_distilled
from workers.model.loading import DTYPES

GENERATE, PROMPT_LOOKUP, ASSISTED = "generate", "prompt lookup", "assisted generation"
LOOKUP_TOKENS = 10
"""Most tokens that prompt lookup drafts at once, as the documentation of `transformers` recommends."""
_NO_CHANGE = RequestOptions()
_SECONDS_PER_TOKEN, _LEAST_SECONDS = 2.0, 600.0
"""Bound of the time of a pass without a bound of its own: for each token that the prompts ask for, and at least."""
_NO_BATCH = "transformers drafts for one sequence at a time"


@dataclass(frozen=True, slots=True)
class Peer:
    """A decoding method of `transformers` that takes part."""

    method: str
    request: RequestOptions = _NO_CHANGE

    @property
    def name(self) -> str:
        """For tables."""
        return ", ".join(filter(None, (f"transformers: {self.method}", self.request.name)))


PEERS = (Peer(GENERATE), Peer(PROMPT_LOOKUP), Peer(ASSISTED))


@dataclass(slots=True)
class _Clock:
    """A streamer of `transformers` that records when tokens come. Its first call has the prompt."""

    begun: float = field(default_factory=time.perf_counter)
    arrivals: list[Arrival] = field(default_factory=list)
    has_prompt: bool = False

    def put(self, tokens: torch.Tensor) -> None:
        """Record tokens of one step: those of one sequence, or one of each."""
        if self.has_prompt:
            self.arrivals.append(Arrival(time.perf_counter() - self.begun, max(1, tokens.shape[-1])))
        self.has_prompt = True

    def end(self) -> None:
        """The answer is complete."""


class TransformersPeer:
    """One decoding method of `transformers`."""

    def __init__(
        self,
        model: Any,
        method: str,
        assistant: Any = None,
        options: RequestOptions = _NO_CHANGE,
        most_seconds: float = 0.0,
    ) -> None:
        """A pass that takes longer than about `most_seconds` is refused; 0: two per token that may be asked, or 600."""
        self._most_seconds = most_seconds
        self._model = model
        self._method = method
        self._options = options
        self._writes_source = bool(getattr(model.config, "is_encoder_decoder", False))
        self._arguments: dict[str, Any] = {}
        if method == PROMPT_LOOKUP:
            self._arguments = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        elif method == ASSISTED:
            self._arguments = {"assistant_model": assistant}
        self._passes = 0
        model.register_forward_pre_hook(self._count)

    async def answer(self, request: PassRequest) -> BenchPass:
        """Answer every prompt of the pass. Several requests run as one batch, padded on the left.

        Raises `WorkerUnavailable` for a batch that the method cannot run, and once the pass takes too long.
        """
        if request.batch > 1 and self._method != GENERATE:
            raise WorkerUnavailable(_NO_BATCH)
        return await asyncio.to_thread(self._answer_all, request)

    def _count(self, *_: Any) -> None:
        self._passes += 1

    def _answer_all(self, request: PassRequest) -> BenchPass:
        begun = time.perf_counter()
        answers: list[BenchAnswer] = []
        passes = 0
        most = self._most_seconds or max(_LEAST_SECONDS, _SECONDS_PER_TOKEN * request.max_tokens * len(request.prompts))
        for first in range(0, len(request.prompts), request.batch):
            if first and time.perf_counter() - begun > most:
                raise WorkerUnavailable(
                    f"transformers: {first} of {len(request.prompts)} prompts took longer than --peer-seconds "
                    f"({most:g})"
                )
            prompts = [prompt.tokens for prompt in request.prompts[first : first + request.batch]]
            try:
                answers += self._answer(prompts, request, request.seed + first)
            except (ValueError, RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
                raise WorkerUnavailable(f"transformers: {error}") from error
            passes += self._passes
        return BenchPass(tuple(answers), time.perf_counter() - begun, {"target_passes": float(passes)})

    @torch.inference_mode()
    def _answer(self, prompts: Sequence[Sequence[int]], request: PassRequest, seed: int) -> list[BenchAnswer]:
        ends, clock = _end_tokens(self._model), _Clock()
        pad = self._pad_token(ends)
        self._passes = 0
        found = self._model.generate(
            **self._inputs(prompts, pad),
            **self._decoding(request, seed),
            **self._arguments,
            max_new_tokens=request.max_tokens,
            pad_token_id=pad,
            streamer=clock if self._options.beams == 1 else None,
        )
        if self._options.beams > 1:
            clock.arrivals.append(Arrival(time.perf_counter() - clock.begun, request.max_tokens))
        # The output begins with the prompt, or with the decoder's start token.
        width = 1 if self._writes_source else max(map(len, prompts))
        return [
            self._recorded(row[width:].tolist(), ends, clock, len(prompt))
            for row, prompt in zip(found, prompts, strict=True)
        ]

    def _inputs(self, prompts: Sequence[Sequence[int]], pad: int) -> dict[str, torch.Tensor]:
        """The prompts in one batch: padded on the left, or for an encoder on the right."""
        width, device = max(map(len, prompts)), self._model.device

        def padded(row: Sequence[int], filling: int) -> list[int]:
            rest = [filling] * (width - len(row))
            return [*row, *rest] if self._writes_source else [*rest, *row]

        return {
            "inputs": torch.tensor([padded(prompt, pad) for prompt in prompts], device=device),
            "attention_mask": torch.tensor([padded([1] * len(prompt), 0) for prompt in prompts], device=device),
        }

    def _decoding(self, request: PassRequest, seed: int) -> dict[str, Any]:
        """How tokens are chosen."""
        chosen: dict[str, Any] = {"top_p": None, "top_k": None, "num_beams": self._options.beams}
        if self._options.beams > 1:
            return chosen | {
                "do_sample": False,
                "temperature": None,
                "length_penalty": self._options.length_penalty,
                "early_stopping": False,
            }
        if request.temperature > 0:
            set_seed(seed)
            return chosen | {"do_sample": True, "temperature": request.temperature, "top_k": 0}
        return chosen | {"do_sample": False, "temperature": None}

    def _pad_token(self, ends: Sequence[int]) -> int:
        own = getattr(self._model.config, "pad_token_id", None) if self._writes_source else None
        return int(own) if own is not None else ends[0] if ends else 0

    def _recorded(self, tokens: list[int], ends: Sequence[int], clock: _Clock, prompt_tokens: int) -> BenchAnswer:
        """The answer up to its first end token."""
        length = next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))
        at_once = self._method != GENERATE or self._options.beams > 1
        arrivals, left = [], length
        for arrival in clock.arrivals:
            count = min(left, arrival.tokens if at_once else 1)
            if count:
                accepted = count - 1 if self._method != GENERATE else 0
                arrivals.append(Arrival(arrival.seconds, count, accepted))
            left -= count
        steps = self._passes if at_once else length
        return BenchAnswer(tuple(tokens[:length]), tuple(arrivals), length, 0, steps, prompt_tokens=prompt_tokens)


def load_target(configuration: Configuration) -> Any:
    """The target with the modules and the attention of `transformers`. Raises `ModelLoadError`."""
    section = configuration.target
    try:
        config = AutoConfig.from_pretrained(section.path)
        family: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        options: dict[str, Any] = {"dtype": DTYPES[section.dtype], "use_safetensors": True}
        model: Any = load_complete(family, Path(section.path), dequantizes=True, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"transformers cannot load {section.path!r}: {error}") from error
    if torch.cuda.is_available() and section.device != "cpu":
        model = model.to("cuda")
    return model.eval().requires_grad_(False)


def load_assistant(directory: Path, target: Path, model: Any) -> Any:
    """A draft model for assisted generation with `model`, whose directory is `target`. Raises `ModelLoadError`.

    A distilled draft keeps its reduced head, so that its passes cost what they cost in a cluster; tokens outside its
    vocabulary get the logit -inf.
    """
    config = AutoConfig.from_pretrained(directory)
    if not is_distilled(directory):
        family: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        assistant: Any = family.from_pretrained(directory, dtype=model.dtype, use_safetensors=True)
        return assistant.to(model.device).eval().requires_grad_(False)
    register()  # it is loaded with the project's attention, and changed below
    draft = load_distilled_draft(directory, target, config, model.dtype, model.device)
    draft.module.set_attn_implementation("sdpa")
    if draft.vocabulary is not None:
        size, module = int(config.get_text_config().vocab_size), draft.module
        head = _WholeVocabulary(module.get_output_embeddings(), draft.vocabulary.to(model.device), size)
        offsets = getattr(module, "final_logits_bias", None)  # [1, reduced] of BART and MarianMT
        if offsets is not None:
            module.final_logits_bias = head.spread(offsets, 0.0)
        module.set_output_embeddings(head)
    draft.module.generation_config.eos_token_id = model.generation_config.eos_token_id
    return draft.module.eval().requires_grad_(False)


class _WholeVocabulary(nn.Module):
    """A reduced head whose logits are spread over the whole vocabulary."""

    def __init__(self, head: nn.Module, vocabulary: torch.Tensor, size: int) -> None:
        super().__init__()
        self.head = head
        self._vocabulary = vocabulary
        self._size = size

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens, `[…, size]`."""
        return self.spread(self.head(hidden), -math.inf)

    def spread(self, reduced: torch.Tensor, missing: float) -> torch.Tensor:
        """Values `[…, reduced]` at their tokens, `[…, size]`, and `missing` at all others."""
        spread = reduced.new_full((*reduced.shape[:-1], self._size), missing)
        spread[..., self._vocabulary] = reduced
        return spread


def _end_tokens(model: Any) -> tuple[int, ...]:
    found = model.generation_config.eos_token_id
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)
