"""Checkpoints of a training: one safetensors file with the progress in its metadata, replaced atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cluster.core.errors import ConfigurationError

TENSORS = "checkpoint.safetensors"
_PROGRESS = "progress"
_BEST = "best."
"""Begins the names of the tensors of `Progress.best`."""


@dataclass(slots=True)
class Progress:
    """The state of a training besides its tensors."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Finished batches of this epoch."""
    seconds: float = 0.0
    """Training time of all runs together, in seconds."""
    longest_step: float = 0.0
    """Time of the longest of the last steps, in seconds. Another step is expected to take no longer."""
    answer_tokens: int = 0
    """Positions that were trained on, counted in every epoch."""
    losses: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, seconds, mean loss since the previous entry)."""
    agreements: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, seconds, quality on held-out answers: agreement, or the estimated tokens per step)."""
    served: list[tuple[int, float, int, float]] = field(default_factory=list)
    """(step, seconds, `answer_tokens`, tokens per step measured in a cluster that serves what is trained)."""
    served_as: str = ""
    """What `served` was measured with; see `EarlyStopping.identity`."""
    best: dict[str, Tensor] = field(default_factory=dict)
    """The parameters of the highest entry of `served`, on the CPU; empty before the first."""

    @property
    def best_served(self) -> float:
        """The highest measured tokens per step; 0 where nothing was measured."""
        return max((entry[-1] for entry in self.served), default=0.0)


def save_checkpoint(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    progress: Progress,
    fingerprint: str,
) -> None:
    """Write a checkpoint. `fingerprint` identifies what is trained and the settings of the training."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"student.{name}": value.detach() for name, value in parameters.items()}
    for name, parameter in parameters.items():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value)
    tensors |= {f"{_BEST}{name}": value for name, value in progress.best.items()}
    metadata = {_PROGRESS: json.dumps(asdict(replace(progress, best={}))), "fingerprint": fingerprint}
    scratch = path.with_name(f"{path.name}.part")
    save_file({name: value.contiguous() for name, value in tensors.items()}, scratch, metadata=metadata)
    os.replace(scratch, path)  # one file, so that tensors and progress always match


def load_checkpoint(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    fingerprint: str,
) -> Progress | None:
    """Restore the parameters and the optimizers. Returns `None` where there is no checkpoint.

    Raises `ConfigurationError` for a checkpoint of another training, or of an earlier version.
    """
    if not path.exists():
        return None
    tensors, metadata = _read(path)
    if metadata.get("fingerprint") != fingerprint:
        raise ConfigurationError(
            f"checkpoint {path}: it belongs to a training with other settings, or an earlier version wrote it "
            f"({metadata.get('fingerprint')}; this training has {fingerprint}); use another directory, "
            "or remove the checkpoint"
        )
    best = {name.removeprefix(_BEST): tensors.pop(name) for name in list(tensors) if name.startswith(_BEST)}
    state: dict[str, dict[str, Tensor]] = {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors.pop(f"student.{name}"))
            state[name] = {}
    for key, value in tensors.items():
        _, entry, name = key.split(".", 2)
        state[name][entry] = value
    for name, parameter in parameters.items():
        if state[name]:
            device = parameter.device
            owner = next(each for each in optimizers if _has(each, parameter))
            owner.state[parameter] = {
                entry: value if entry == "step" else value.to(device) for entry, value in state[name].items()
            }
    values: dict[str, Any] = json.loads(metadata[_PROGRESS])
    for name in ("losses", "agreements", "served"):
        values[name] = [tuple(entry) for entry in values.get(name, ())]
    return Progress(**values | {"best": best})


def stored_seconds(path: Path) -> float:
    """The training time of a checkpoint in seconds; 0 where there is none."""
    if not path.exists():
        return 0.0
    with safe_open(path, framework="pt") as file:
        return float(json.loads((file.metadata() or {})[_PROGRESS])["seconds"])


def _has(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    return any(parameter is each for group in optimizer.param_groups for each in group["params"])


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    return load_file(path), metadata
