"""Several processes train one drafter: Ray Train starts and restarts them, FSDP2 divides the module among them.

Each has a part of the texts' hidden states, which are stored, and of the target its embedding and its head alone.
Checkpoints are Ray Train's: when a process dies, all start again from the last one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from cluster.core.errors import ConfigurationError
from deploy.distillation.single_process import Progress, SingleProcess
from deploy.machine import local_resources
from deploy.ray.start_ray import start_local_ray
from workers.distill.device_training import DeviceTraining
from workers.distill.peers import Peers

try:
    from ray import train as ray_train
    from ray.train.torch import TorchTrainer, get_device
except ImportError as error:
    raise ConfigurationError(
        "--workers: Ray Train is not installed; run `pip install 'pilotfish-distill[workers]'`"
    ) from error

_FILE = "state.safetensors"
_MODULE, _STATE = "module", "state"
_GROUPS, _VALUES = "groups", "values"
_MOST_FAILURES = 3
"""Lost processes after which a training ends."""

Make = Callable[[argparse.Namespace, Callable[[str], None] | None, Peers], SingleProcess]
"""Makes the run of one process."""


class RayCheckpoints:
    """The checkpoints of a training that Ray Train runs. It is a `Checkpoints`."""

    def load(self, training: DeviceTraining[Any, Any, Any]) -> Progress:
        """Go on from the last checkpoint, if there is one."""
        checkpoint = ray_train.get_checkpoint()
        if checkpoint is None:
            return Progress()
        with checkpoint.as_directory() as directory:
            values = load_state(Path(directory) / _FILE, training.module, training.optimizers)
        return Progress(int(values["step"]), values["seconds"], values["best"])

    def save(self, training: DeviceTraining[Any, Any, Any], progress: Progress) -> None:
        """Write a checkpoint. All processes have to call it."""
        values = {"step": progress.step, "seconds": progress.seconds, "best": progress.best}
        with tempfile.TemporaryDirectory() as directory:
            save_state(Path(directory) / _FILE, training.module, training.optimizers, values)
            is_first = dist.get_rank() == 0
            checkpoint = ray_train.Checkpoint.from_directory(directory) if is_first else None
            ray_train.report(values, checkpoint=checkpoint)


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


def run_in_workers(chosen: argparse.Namespace, make: Make, answers: Path) -> None:
    """Train as the options say in `chosen.workers` processes, on the texts of a file of answers and stored states.

    Each has a GPU, or one core. Raises `ConfigurationError` where the machine has not as many.
    """
    resources = local_resources()
    is_gpu = torch.device(chosen.device).type == "cuda"
    most = resources.gpus if is_gpu else int(resources.cpus)
    if chosen.workers > most:
        kind = "GPUs" if is_gpu else "cores"
        raise ConfigurationError(f"--workers: {chosen.workers} is refused; this machine has {most} {kind}")
    if not ray.is_initialized():
        start_local_ray(resources)
    # Processes of Ray Train have working directories of their own.
    values = vars(chosen) | {"answers": answers, "write_seconds": 0.0, "target": str(Path(chosen.target).resolve())}
    for name, value in values.items():
        if isinstance(value, Path):
            values[name] = value.resolve()
    values["prompts"] = [path.resolve() for path in chosen.prompts]
    trainer = TorchTrainer(
        train_in_worker,
        train_loop_config={"options": values, "make": make},
        scaling_config=ray_train.ScalingConfig(num_workers=chosen.workers, use_gpu=is_gpu),
        run_config=ray_train.RunConfig(
            name=f"{chosen.out.name}-{_digest(values)}",
            storage_path=str(answers.resolve().parent),
            failure_config=ray_train.FailureConfig(max_failures=_MOST_FAILURES),
            checkpoint_config=ray_train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


def train_in_worker(config: dict[str, Any]) -> None:
    """What each process does. Ray Train has initialized `torch.distributed`."""
    device = get_device()
    chosen = argparse.Namespace(**config["options"])
    chosen.device = str(device)
    peers = Peers.of(dist.group.WORLD, device.type)
    make: Make = config["make"]
    run = make(chosen, None if peers.rank == 0 else _silent, peers)
    run.checkpoints = RayCheckpoints()
    run.run()


def _silent(_: str) -> None:
    """Only the first process tells its progress."""


def _digest(values: dict[str, Any]) -> str:
    """Names what is trained: another training starts anew."""
    return hashlib.blake2b(json.dumps(values, default=str, sort_keys=True).encode(), digest_size=8).hexdigest()
