"""States of a training that may be interrupted: parameters, states of optimizers, and how far it is."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from workers.distill.device_training import DeviceTraining, Resumed

STATE = "state.safetensors"
"""The name of the file of a state."""
_MODULE, _STATE = "module", "state"
_GROUPS, _VALUES = "groups", "values"
_PAUSE = 20.0
"""Times as long as it took to write a state, nothing is written again: writing takes a twentieth of the time."""


class Checkpoints(Protocol):
    """Keeps the state of a training that may be interrupted."""

    def load(self, training: DeviceTraining[Any, Any, Any]) -> Resumed:
        """Give module and optimizers the last state that was saved, if there is one."""

    def save(self, training: DeviceTraining[Any, Any, Any], reached: Resumed) -> None:
        """Save the state of module and optimizers, unless it was saved just before."""


class _NoCheckpoints:
    def load(self, _: DeviceTraining[Any, Any, Any]) -> Resumed:
        return Resumed()

    def save(self, _: DeviceTraining[Any, Any, Any], __: Resumed) -> None:
        pass


NO_CHECKPOINTS = _NoCheckpoints()
"""For a training that does not resume."""


class FileCheckpoints:
    """The state of a training in one process, in a file that is replaced. It is a `Checkpoints`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._next = -math.inf

    def load(self, training: DeviceTraining[Any, Any, Any]) -> Resumed:
        if not self._path.exists():
            return Resumed()
        values = load_state(self._path, training.module, training.optimizers)
        return Resumed(int(values["step"]), values["seconds"])

    def save(self, training: DeviceTraining[Any, Any, Any], reached: Resumed) -> None:
        begun = self._clock()
        if begun < self._next:
            return
        scratch = self._path.with_name(f"{self._path.name}.part")
        save_state(scratch, training.module, training.optimizers, {"step": reached.step, "seconds": reached.seconds})
        os.replace(scratch, self._path)
        ended = self._clock()
        self._next = ended + _PAUSE * (ended - begun)


def save_state(
    path: Path, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], values: Mapping[str, float]
) -> None:
    """Write parameters, states of optimizers and some numbers. All processes have to call it; the first one writes."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights: Any
    states: Any
    weights, states = get_state_dict(module, list(optimizers), options=options)
    if not weights:  # a process other than the first one
        return
    tensors = {f"{_MODULE}/{name}": value for name, value in weights.items()}
    for name, state in states["state"].items():
        tensors |= {f"{_STATE}/{name}/{key}": value for key, value in state.items()}
    metadata = {_GROUPS: json.dumps(states["param_groups"]), _VALUES: json.dumps(dict(values))}
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata)


def load_state(path: Path, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, float]:
    """Read what `save_state` wrote into a module and its optimizers. Returns the numbers."""
    weights: dict[str, Any] = {}
    states: dict[str, Any] = {}
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            kind, _, rest = name.partition("/")
            if kind == _MODULE:
                weights[rest] = file.get_tensor(name)
            else:
                parameter, _, key = rest.rpartition("/")
                states.setdefault(parameter, {})[key] = file.get_tensor(name)
    set_state_dict(
        module,
        list(optimizers),
        model_state_dict=weights,
        optim_state_dict={"state": states, "param_groups": json.loads(metadata[_GROUPS])},
        options=StateDictOptions(full_state_dict=True),
    )
    found: dict[str, float] = json.loads(metadata[_VALUES])
    return found
