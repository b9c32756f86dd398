"""Checkpoints of a training: one safetensors file with the progress in its metadata, replaced atomically."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.core.errors import ConfigurationError
from workers.distill.student import Student

TENSORS = "checkpoint.safetensors"
_PROGRESS = "progress"


@dataclass(slots=True)
class Progress:
    """The state of a training besides its tensors."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Finished batches of this epoch."""
    seconds: float = 0.0
    """Training time of all runs together, in seconds."""
    answer_tokens: int = 0
    """Positions that were trained on, counted in every epoch."""
    losses: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, seconds, mean loss since the previous entry)."""
    agreements: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, seconds, agreement on held-out answers)."""


def save_checkpoint(
    directory: Path, student: Student, optimizer: torch.optim.Optimizer, progress: Progress, fingerprint: str
) -> None:
    """Write a checkpoint. `fingerprint` identifies the student and the settings of the training."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"student.{name}": value.detach() for name, value in student.own_parameters().items()}
    for name, parameter in student.own_parameters().items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value)
    metadata = {_PROGRESS: json.dumps(asdict(progress)), "fingerprint": fingerprint}
    scratch = directory / f"{TENSORS}.part"
    save_file({name: value.contiguous() for name, value in tensors.items()}, scratch, metadata=metadata)
    os.replace(scratch, directory / TENSORS)  # one file, so that tensors and progress always match


def load_checkpoint(
    directory: Path, student: Student, optimizer: torch.optim.Optimizer, fingerprint: str
) -> Progress | None:
    """Restore the student and the optimizer. Returns `None` where there is no checkpoint.

    Raises `ConfigurationError` for a checkpoint of another training.
    """
    path = directory / TENSORS
    if not path.exists():
        return None
    tensors, metadata = _read(path)
    if metadata.get("fingerprint") != fingerprint:
        raise ConfigurationError(
            f"checkpoint {path}: it belongs to a training with other settings ({metadata.get('fingerprint')}), "
            f"this training has {fingerprint}; use another directory, or remove the checkpoint"
        )
    state: dict[str, dict[str, Tensor]] = {}
    with torch.no_grad():
        for name, parameter in student.own_parameters().items():
            parameter.copy_(tensors.pop(f"student.{name}"))
            state[name] = {}
    for key, value in tensors.items():
        _, entry, name = key.split(".", 2)
        state[name][entry] = value
    for name, parameter in student.own_parameters().items():
        if state[name]:
            device = parameter.device
            optimizer.state[parameter] = {
                entry: value if entry == "step" else value.to(device) for entry, value in state[name].items()
            }
    values: dict[str, Any] = json.loads(metadata[_PROGRESS])
    for name in ("losses", "agreements"):
        values[name] = [tuple(entry) for entry in values[name]]
    return Progress(**values)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    return load_file(path), metadata
