"""The student of an encoder-decoder target: decoder layers of its own under the target's encoder, embedding and head.

With a deep encoder, a shallow decoder translates nearly as well (Kasai et al. 2021), and only the decoder runs for
every token. The encoder is frozen, so what it says of a source is computed once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from cluster.core.errors import ConfigurationError, shorten
from workers.distill.answers import Answer
from workers.distill.examples import Batch, make_batch
from workers.distill.student import Student, StudentPlan, check_layers, head_rows
from workers.forward.encoder_decoder.decoder import logits_scale
from workers.model.target_ends import decoder_parameters

_LAYER = re.compile(r"^(?P<before>.*\bdecoder\.(?:layers|block)\.)(?P<number>\d+)(?P<after>\..*)$")
_LAYER_COUNTS = ("decoder_layers", "num_decoder_layers")
_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "dropout_rate", "decoder_layerdrop")
MAX_STORED_POSITIONS = 1 << 19
"""Most positions of sources whose encoded states are stored: 512 MiB at a width of 512."""


class Seq2SeqStudent(Student):
    """A trainable decoder. Its encoder is the target's and stays in evaluation mode."""

    def __init__(
        self,
        module: PreTrainedModel,
        head: Tensor,
        head_bias: Tensor | None,
        vocabulary: Tensor | None,
        layers: Sequence[int],
        decoder_start: tuple[int, ...],
    ) -> None:
        super().__init__(module, head, head_bias, vocabulary, layers)
        self._decoder_start = decoder_start
        self._encoded: dict[tuple[int, ...], Tensor] = {}
        self._stored_positions = 0
        self._scale = logits_scale(module) or 1.0

    def train(self, mode: bool = True) -> Self:
        """Switch to training. The encoder stays as the target has it."""
        super().train(mode)
        self.module.get_encoder().eval()
        return self

    def batch(self, answers: Sequence[Answer], max_length: int) -> Batch:
        """One batch of answers, whose prompts are sources."""
        rows = [replace(answer, prompt=self._decoder_start) for answer in answers]
        return replace(make_batch(rows, max_length), sources=tuple(answer.prompt for answer in answers))

    def states(self, batch: Batch) -> Tensor:
        """The final hidden states [positions, hidden] of the decoder."""
        encoded = [self._encode(source) for source in batch.sources]
        memory = nn.utils.rnn.pad_sequence(encoded, batch_first=True)  # [rows, source, hidden]
        mask = torch.zeros(memory.shape[:2], dtype=torch.long, device=memory.device)
        for row, source in enumerate(batch.sources):
            mask[row, : len(source)] = 1
        output = self.module.get_decoder()(
            input_ids=batch.tokens, encoder_hidden_states=memory, encoder_attention_mask=mask, use_cache=False
        )
        states: Tensor = output.last_hidden_state
        return states.flatten(0, 1)[batch.selected] * self._scale

    @torch.no_grad()
    def _encode(self, source: tuple[int, ...]) -> Tensor:
        """What the encoder says of a source, [source, hidden]."""
        states = self._encoded.get(source)
        if states is None:
            tokens = torch.tensor([source], device=self.head.device)
            with torch.autocast(tokens.device.type, enabled=False):
                states = self.module.get_encoder()(input_ids=tokens).last_hidden_state[0]
            if self._stored_positions + len(source) <= MAX_STORED_POSITIONS:
                self._stored_positions += len(source)
                self._encoded[source] = states.half()
        return states.float()


def make_seq2seq_student(target: Any, plan: StudentPlan, decoder_start: tuple[int, ...], seed: int) -> Seq2SeqStudent:
    """Make a float32 student with the target's encoder, embedding and head. Raises `ConfigurationError`."""
    torch.manual_seed(seed)
    module: Any = AutoModelForSeq2SeqLM.from_config(student_config(target.config, plan), dtype=torch.float32)
    own = decoder_parameters(module)
    if plan.weights is not None:
        _fill(own, {name: value.float() for name, value in plan.weights.items()}, plan)
    else:
        _fill(own, _layers_of(target.state_dict(), own, plan.layers), plan)
    module.requires_grad_(False)
    for parameter in own.values():
        parameter.requires_grad_(True)
    encoder, decoder = module.get_encoder(), module.get_decoder()
    for name, part in module.named_modules():
        if part is encoder:
            module.set_submodule(name, target.get_encoder())
            break
    decoder.set_input_embeddings(target.get_decoder().get_input_embeddings())
    head = target.get_output_embeddings()
    module.get_output_embeddings().weight = nn.Parameter(torch.empty(0), requires_grad=False)
    vocabulary = None if plan.vocabulary is None else torch.tensor(plan.vocabulary, dtype=torch.long)
    offsets = getattr(target, "final_logits_bias", None)  # [1, tokens]
    bias = None if offsets is None else head_rows(offsets[0], vocabulary)
    student = Seq2SeqStudent(module, head_rows(head.weight, vocabulary), bias, vocabulary, plan.layers, decoder_start)
    return student.to(head.weight.device)


def student_config(target: PreTrainedConfig, plan: StudentPlan) -> PreTrainedConfig:
    """The target's configuration with the student's decoder layers and no dropout. Raises `ConfigurationError`."""
    if plan.config is not None and plan.weights is None:
        raise ConfigurationError(
            "config: refused for an encoder-decoder target; needed layers, or a draft to start from"
        )
    key = next((name for name in _LAYER_COUNTS if hasattr(target, name)), None)
    if key is None:
        raise ConfigurationError(f"target: model type {target.model_type!r} names no number of decoder layers")
    if not plan.layers:
        raise ConfigurationError("layers: needed at least one of the target's decoder layers")
    check_layers(plan.layers, int(getattr(target, key)))
    values: dict[str, Any] = target.to_dict()
    values[key] = len(plan.layers)
    values.update({name: 0.0 for name in _DROPOUTS if name in values})
    config: PreTrainedConfig = type(target).from_dict(values)
    return config


def _layers_of(source: dict[str, Tensor], own: dict[str, nn.Parameter], layers: Sequence[int]) -> dict[str, Tensor]:
    """The target's parameters for each of the student's: layer `layers[i]` for layer `i`, others as they are."""
    found: dict[str, Tensor] = {}
    for name in own:
        layer = _LAYER.match(name)
        origin = name if layer is None else f"{layer['before']}{layers[int(layer['number'])]}{layer['after']}"
        # T5 keeps the biases of relative positions in its first layer.
        values = source.get(origin, source.get(name))
        if values is not None:
            found[name] = values.detach().float()
    return found


def _fill(own: dict[str, nn.Parameter], values: dict[str, Tensor], plan: StudentPlan) -> None:
    for name, parameter in own.items():
        if name not in values or values[name].shape != parameter.shape:
            raise ConfigurationError(
                f"layers: {shorten(list(plan.layers))} is refused; there is no {name} of shape {list(parameter.shape)}"
            )
        with torch.no_grad():
            parameter.copy_(values[name])
