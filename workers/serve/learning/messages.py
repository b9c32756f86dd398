"""What a drafter's process and its learner tell each other through files: tensors in the format of safetensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, variance
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cluster.core import bounds
from cluster.wire.codec.common import decode_start, encode_start
from pilotfish.v1 import common_pb2
from workers.draft.common.learning import CollectedText
from workers.model.tensor_file import write_tensors

_ABOUT = "about"
"""Name of the tensor with a JSON object."""
_PARTS = ("training", "left_out", "held_back")
"""Begins the names of the tensors of texts."""
_RECENT = 16
"""Held-back texts, the latest ones, that decide alone where they can."""
NOISE = 2.0
"""A difference of up to as many standard errors says nothing."""


@dataclass(frozen=True, slots=True)
class Task:
    """One training: the weights that it begins with, and the texts."""

    configuration: Mapping[str, Any]
    """The sections `draft` and `target`."""
    weights: Mapping[str, Tensor]
    training: Sequence[CollectedText]
    left_out: Sequence[CollectedText]
    held_back: Sequence[CollectedText]
    seed: int = 0

    def write(self, file: IO[bytes]) -> None:
        """Write the task. Raises `OSError`."""
        tensors = {f"weights.{name}": value for name, value in self.weights.items()}
        parts = (self.training, self.left_out, self.held_back)
        for kind, texts in zip(_PARTS, parts, strict=True):
            for index, text in enumerate(texts):
                tensors |= _encode_text(f"{kind}.{index}", text)
        about = {"configuration": self.configuration, "seed": self.seed}
        sizes = {kind: len(texts) for kind, texts in zip(_PARTS, parts, strict=True)}
        write_tensors(file, tensors | {_ABOUT: _encode_json(about | sizes)})

    @staticmethod
    def read(path: Path) -> Task:
        """The task that `write` wrote. Its tensors are mapped from the file."""
        tensors = load_file(path)
        about = _decode_json(tensors[_ABOUT])
        training, left_out, held_back = (
            [_decode_text(f"{kind}.{index}", tensors) for index in range(about[kind])] for kind in _PARTS
        )
        return Task(about["configuration"], _weights_in(tensors), training, left_out, held_back, about["seed"])


@dataclass(frozen=True, slots=True)
class Candidate:
    """The result of a training: new weights, and how both weights draft for each held-back text."""

    weights: Mapping[str, Tensor]
    rounds_before: tuple[int, ...]
    """Steps of the target that each held-back text takes with the weights that the training began with."""
    rounds_after: tuple[int, ...]
    """The same with the new weights."""
    tokens: tuple[int, ...]
    """Tokens of each held-back text that these steps decide."""

    def write(self, file: IO[bytes]) -> None:
        """Write the candidate. Raises `OSError`."""
        about = {"before": self.rounds_before, "after": self.rounds_after, "tokens": self.tokens}
        tensors = {f"weights.{name}": value for name, value in self.weights.items()}
        write_tensors(file, tensors | {_ABOUT: _encode_json(about)})

    @staticmethod
    def read(path: Path) -> Candidate:
        """The candidate that `write` wrote. Its weights are mapped from the file.

        Raises `ValueError` for another file.
        """
        try:
            tensors = load_file(path)
            about = _decode_json(tensors[_ABOUT])
            before, after, tokens = (tuple(map(int, about[name])) for name in ("before", "after", "tokens"))
            for rounds in (before, after):
                for count, decided in zip(rounds, tokens, strict=True):
                    if not 0 <= count <= decided <= count * (bounds.MAX_TREE_NODES + 1):
                        raise ValueError(f"{count} steps decide {decided} tokens")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"candidate: needed weights and measurements, found {error!r}") from None
        return Candidate(_weights_in(tensors), before, after, tokens)

    @property
    def tokens_per_step_before(self) -> float:
        """Tokens per step of the target with the weights that the training began with."""
        return sum(self.tokens) / max(1, sum(self.rounds_before))

    @property
    def tokens_per_step(self) -> float:
        """Tokens per step of the target with the new weights."""
        return sum(self.tokens) / max(1, sum(self.rounds_after))

    @property
    def is_better(self) -> bool:
        """Whether the new weights save steps beyond the noise; see `steps_saved`."""
        return steps_saved(self.rounds_before, self.rounds_after) > NOISE


def steps_saved(before: Sequence[int], after: Sequence[int]) -> float:
    """The mean of the steps that `after` saves over `before`, in its standard errors; negative if it takes more.

    Both count the steps of each text, oldest first. Where traffic has changed, old texts speak for weights that draft
    worse now. So the latest 16 decide if their difference is beyond the noise; else all texts do.
    """
    saved = [old - new for old, new in zip(before, after, strict=True)]
    recent = _in_standard_errors(saved[-_RECENT:])
    return recent if abs(recent) > NOISE else _in_standard_errors(saved)


def _in_standard_errors(values: Sequence[int]) -> float:
    """The mean of the values, divided by its standard error; 0 for fewer than two."""
    if len(values) < 2 or not any(values):
        return 0.0
    error = (variance(values) / len(values)) ** 0.5
    return mean(values) / error if error else math.copysign(math.inf, values[0])


def _encode_text(name: str, text: CollectedText) -> dict[str, Tensor]:
    start = encode_start(text.start).SerializeToString()
    return {
        f"{name}.start": torch.frombuffer(bytearray(start), dtype=torch.uint8),
        f"{name}.tokens": torch.tensor(text.tokens, dtype=torch.int32),
        f"{name}.first": torch.tensor([text.first]),
        f"{name}.hidden": text.hidden,
        f"{name}.failures": torch.tensor(text.failures, dtype=torch.int32),
    }


def _decode_text(name: str, tensors: Mapping[str, Tensor]) -> CollectedText:
    message = common_pb2.SequenceStart.FromString(bytes(tensors[f"{name}.start"].tolist()))
    tokens, failures = (tuple(tensors[f"{name}.{part}"].tolist()) for part in ("tokens", "failures"))
    first = int(tensors[f"{name}.first"])
    return CollectedText(decode_start(message, name), tokens, first, tensors[f"{name}.hidden"], failures)


def _weights_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = "weights."
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _encode_json(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode_json(tensor: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(bytes(tensor.tolist()))
    return found
