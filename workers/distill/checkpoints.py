"""Where a training stands, on disk: tensors as safetensors, the rest as JSON, replaced whole or not at all."""

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
    """How far a training has come."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""
    seconds: float = 0.0
    """Of training, all runs together."""
    answer_tokens: int = 0
    """Positions whose loss was taken."""
    losses: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, seconds, mean loss since the entry before)."""
    agreements: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, seconds, agreement on held-out answers)."""


def save_checkpoint(
    directory: Path, student: Student, optimizer: torch.optim.Optimizer, progress: Progress, fingerprint: str
) -> None:
    """Write where the training stands. `fingerprint` names what it trains on and how."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {f"student.{name}": value.detach() for name, value in student.own_parameters().items()}
    for name, parameter in student.own_parameters().items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value)
    metadata = {_PROGRESS: json.dumps(asdict(progress)), "fingerprint": fingerprint}
    scratch = directory / f"{TENSORS}.part"
    save_file({name: value.contiguous() for name, value in tensors.items()}, scratch, metadata=metadata)
    os.replace(scratch, directory / TENSORS)  # tensors and progress are one file: neither is ever without the other


def load_checkpoint(
    directory: Path, student: Student, optimizer: torch.optim.Optimizer, fingerprint: str
) -> Progress | None:
    """Put the student and the optimizer where the training stood; `None` where there is no checkpoint.

    Raises `ConfigurationError` for one of another training.
    """
    path = directory / TENSORS
    if not path.exists():
        return None
    tensors, metadata = _read(path)
    if metadata.get("fingerprint") != fingerprint:
        raise ConfigurationError(
            f"checkpoint {path}: it is of a training with other settings ({metadata.get('fingerprint')}), "
            f"this one has {fingerprint}; take another directory, or remove it"
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
