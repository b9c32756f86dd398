"""The student: a small causal language model that uses the target's embedding and the target's head.

Only its own layers are trained and stored. The head may be reduced to the rows of the most frequent tokens: in a model
as small as a draft, a head over the whole vocabulary costs as much time as the layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from cluster.core.errors import ConfigurationError, shorten
from workers.distill.answers import Answer
from workers.distill.examples import Batch, make_batch
from workers.distill.output import check_replaceable, replaced_directory
from workers.distill.vocabulary import check_size
from workers.model.distilled import read_draft_files
from workers.model.draft_card import VOCABULARY, WEIGHTS, DraftCard
from workers.model.drafting.ends import rows_of_tokens
from workers.model.stretch import EACH_LAYER
from workers.model.target_ends import decoder_vocabulary_size, logit_factor, read_config
from workers.model.tensor_file import in_bfloat16

_LAYER = re.compile(r"^(?P<before>.*\b(?:layers|h)\.)(?P<number>\d+)(?P<after>\..*)$")


@dataclass(frozen=True, slots=True)
class StudentPlan:
    """Settings of a student."""

    layers: tuple[int, ...] = ()
    """The target's layers that it starts as, in order. Empty: random weights of the shape of `config`."""
    config: Path | None = None
    """A `transformers` configuration of the target's vocabulary and width. `None`: the target's, with `layers`."""
    vocabulary: tuple[int, ...] | None = None
    """The tokens that it can propose, ascending. `None` means all."""
    weights: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)
    """Initial weights by parameter name, instead of the target's layers."""

    @classmethod
    def of_draft(cls, directory: Path) -> StudentPlan:
        """A student like the draft, with its weights and vocabulary. Raises `ModelLoadError`."""
        card, weights, vocabulary = read_draft_files(directory, read_config(directory))
        tokens = None if vocabulary is None else tuple(vocabulary.tolist())
        return cls(card.layers, directory / "config.json", tokens, weights)


class Student(nn.Module):
    """A trainable model with a frozen embedding and a frozen head."""

    def __init__(
        self,
        module: PreTrainedModel,
        head: Tensor,
        head_bias: Tensor | None,
        vocabulary: Tensor | None,
        layers: Sequence[int],
    ) -> None:
        super().__init__()
        self.module = module
        """The `transformers` model. Its embedding is the target's; its own head is not used."""
        self.head: Tensor
        self.head_bias: Tensor | None
        self.vocabulary: Tensor | None
        self.position_in_head: Tensor
        self.register_buffer("head", head, persistent=False)  # [draft vocabulary, hidden]
        self.register_buffer("head_bias", head_bias, persistent=False)  # [draft vocabulary]
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        self.register_buffer(
            "position_in_head", rows_of_tokens(vocabulary, int(module.config.vocab_size)), persistent=False
        )
        self.layers = tuple(layers)

    def batch(self, answers: Sequence[Answer], max_length: int) -> Batch:
        """One batch of answers, each cut to `max_length` tokens."""
        return make_batch(answers, max_length)

    def states(self, batch: Batch) -> Tensor:
        """The final hidden states [positions, hidden] at the positions of a batch that are trained on."""
        return self.hidden(batch.tokens).flatten(0, 1)[batch.selected]

    def hidden(self, tokens: Tensor) -> Tensor:
        """The final hidden states [rows, length, hidden] of tokens [rows, length], which are padded on the right."""
        output = self.module.base_model(input_ids=tokens, use_cache=False)
        states: Tensor = output.last_hidden_state
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [positions, draft vocabulary] of hidden states [positions, hidden]."""
        return nn.functional.linear(hidden, self.head, self.head_bias)

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained and stored, by their names in `transformers`."""
        return {name: value for name, value in self.module.named_parameters() if value.requires_grad}

    def tokens_of(self, positions: Tensor) -> Tensor:
        """The target's token ids of rows of the head."""
        return positions if self.vocabulary is None else self.vocabulary[positions]


def checked_config(target_directory: Path, plan: StudentPlan, vocabulary_size: int | None) -> PreTrainedConfig:
    """The student's configuration. It reads no weights. Raises `ConfigurationError`, `ModelLoadError`."""
    target = read_config(target_directory)
    if vocabulary_size is not None:
        check_size(vocabulary_size, int(target.vocab_size))
    return _config(target, plan)


def make_student(target: Any, plan: StudentPlan, seed: int) -> Student:
    """Make a float32 student with the target's embedding and head, on its device.

    Raises `ConfigurationError` for a plan that does not fit the target, and `ModelLoadError` where the
    configuration that it names cannot be read.
    """
    config = _config(target.config, plan)
    torch.manual_seed(seed)
    module: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    if plan.weights is not None:
        module.load_state_dict(module.state_dict() | {name: value.float() for name, value in plan.weights.items()})
    elif plan.layers:
        _copy_layers(target, module, plan.layers)
    embedding = target.get_input_embeddings().weight.detach()
    head = target.get_output_embeddings()
    module.requires_grad_(True)
    module.get_input_embeddings().weight = nn.Parameter(embedding.float(), requires_grad=False)
    own_head = module.get_output_embeddings()
    own_head.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    if getattr(own_head, "bias", None) is not None:
        own_head.bias = None
    vocabulary = None if plan.vocabulary is None else torch.tensor(plan.vocabulary, dtype=torch.long)
    bias = None if getattr(head, "bias", None) is None else head_rows(head.bias, vocabulary)
    factor = logit_factor(config)  # a student's own, since the served draft has the target's head as it is
    rows = head_rows(head.weight, vocabulary).mul_(factor)
    bias = None if bias is None else bias.mul_(factor)
    return Student(module, rows, bias, vocabulary, plan.layers).to(embedding.device)


def head_rows(end: Tensor, vocabulary: Tensor | None) -> Tensor:
    """A float32 copy of the rows of a head (or of its bias) for the tokens in `vocabulary`."""
    values = end.detach().float()
    return values.clone() if vocabulary is None else values[vocabulary.to(values.device)]


def check_layers(layers: Sequence[int], count: int) -> None:
    """Raise `ConfigurationError` unless these are layers of a target with `count` of them."""
    for layer in layers:
        if not 0 <= layer < count:
            raise ConfigurationError(f"layers: {layer} is refused; it must be within 0 and {count - 1}")


def _config(target: PreTrainedConfig, plan: StudentPlan) -> PreTrainedConfig:
    """The student's configuration. Raises `ConfigurationError` where it does not fit the target's, `ModelLoadError`."""
    check_layers(plan.layers, int(target.num_hidden_layers))
    if plan.config is not None:
        return _read_config(plan.config, target, len(plan.layers))
    if not plan.layers:
        raise ConfigurationError("layers: needed at least one of the target's, or a config")
    values: dict[str, Any] = target.to_dict()
    values["num_hidden_layers"] = len(plan.layers)
    for name in EACH_LAYER:
        if isinstance(values.get(name), list):
            values[name] = [values[name][layer] for layer in plan.layers]
    return type(target).from_dict(values)


def _read_config(path: Path, target: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    config = read_config(path)
    if config.vocab_size != target.vocab_size:
        raise ConfigurationError(
            f"config {path}: vocab_size {config.vocab_size} is refused; it must be the target's, {target.vocab_size}"
        )
    if config.hidden_size != target.hidden_size:
        raise ConfigurationError(
            f"config {path}: hidden_size {config.hidden_size} is refused; it must be the target's, {target.hidden_size}"
        )
    if layers and config.num_hidden_layers != layers:
        raise ConfigurationError(
            f"layers: {layers} of them are refused; config {path} has {config.num_hidden_layers} hidden layers"
        )
    return config


def _copy_layers(target: PreTrainedModel, module: PreTrainedModel, layers: Sequence[int]) -> None:
    """Copy the target's layer `layers[i]` to layer `i`, and the parameters that belong to no layer as they are."""
    source = target.state_dict()
    own: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        found = _LAYER.match(name)
        origin = name if found is None else f"{found['before']}{layers[int(found['number'])]}{found['after']}"
        if origin not in source or source[origin].shape != value.shape:
            raise ConfigurationError(
                f"layers: {shorten(list(layers))} is refused; the target has no {origin} of this shape"
            )
        own[name] = source[origin].float()
    module.load_state_dict(own)


def export(student: Student, directory: Path, target_name: str, card: str, pictures: dict[str, bytes]) -> None:
    """Replace the draft's directory: configuration, description, weights in bfloat16, model card, pictures.

    Raises `ConfigurationError` where the directory holds something other than a draft.
    """
    check_replaceable(directory)
    tensors = in_bfloat16(student.own_parameters())
    if student.vocabulary is not None:
        tensors[VOCABULARY] = student.vocabulary.to("cpu", torch.int32)
    with replaced_directory(directory, card, pictures) as scratch:
        save_file(tensors, scratch / WEIGHTS, metadata={"format": "pt"})
        config = json.dumps(_config_values(student) | {"dtype": "bfloat16"}, indent=2)
        (scratch / "config.json").write_text(config + "\n", encoding="utf-8")
        size = None if student.vocabulary is None else len(student.vocabulary)
        own = student.module.config
        sizes = decoder_vocabulary_size(own), int(own.hidden_size)
        DraftCard(target_name, *sizes, student.layers, size).write(scratch)


def _config_values(student: Student) -> dict[str, Any]:
    """The student's configuration as it is stored in `config.json`."""
    values: dict[str, Any] = json.loads(student.module.config.to_json_string(use_diff=True))
    for name in ("_name_or_path", "_model_name_or_path", "transformers_version"):
        values.pop(name, None)
    return values
