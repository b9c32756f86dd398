"""The state of a training whose module may be sharded, in one safetensors file that any number of processes reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

_MODULE, _STATE = "module", "state"
_GROUPS, _VALUES = "groups", "values"


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
