"""Several processes train one drafter: Ray Train starts and restarts them, FSDP2 divides the module among them.

Each has a part of the texts' hidden states, which are stored, and of the target its embedding and its head alone.
Checkpoints are Ray Train's: when a process dies, all start again from the last one.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from cluster.core.errors import ConfigurationError, PilotfishError
from deploy.distillation.checkpoints import STATE, load_state, save_state
from deploy.distillation.single_process import SingleProcess
from deploy.distillation.training_directory import TrainingDirectory
from deploy.machine import local_resources
from deploy.ray.start_ray import start_local_ray
from workers.distill.device_training import DeviceTraining, Resumed
from workers.distill.peers import Peers

try:
    from ray import train as ray_train
    from ray.train.torch import TorchTrainer, get_device
except ImportError as error:
    raise ConfigurationError(
        "--workers: Ray Train is not installed; run `pip install 'pilotfish-distill[workers]'`"
    ) from error

_MOST_FAILURES = 3
"""Lost processes after which a training ends."""
_REFUSED = "refused"
"""The file in the directory of a training that says why its processes refuse to go on."""

Make = Callable[[argparse.Namespace, Callable[[str], None] | None, Peers], SingleProcess]
"""Makes the run of one process."""


class RayCheckpoints:
    """The checkpoints of a training that Ray Train runs. It is a `Checkpoints`."""

    def load(self, training: DeviceTraining[Any, Any, Any]) -> Resumed:
        checkpoint = ray_train.get_checkpoint()
        if checkpoint is None:
            return Resumed()
        with checkpoint.as_directory() as directory:
            values = load_state(Path(directory) / STATE, training.module, training.optimizers)
        return Resumed(int(values["step"]), values["seconds"])

    def save(self, training: DeviceTraining[Any, Any, Any], reached: Resumed) -> None:
        """All processes have to call it."""
        values = {"step": reached.step, "seconds": reached.seconds}
        with tempfile.TemporaryDirectory() as directory:
            save_state(Path(directory) / STATE, training.module, training.optimizers, values)
            is_first = dist.get_rank() == 0
            checkpoint = ray_train.Checkpoint.from_directory(directory) if is_first else None
            ray_train.report(values, checkpoint=checkpoint)


def run_in_workers(chosen: argparse.Namespace, make: Make, kept: TrainingDirectory | None) -> None:
    """Train as the options say in `chosen.workers` processes, on answers and states that are stored.

    Each has a GPU, or one core. Raises `ConfigurationError` without a directory of the training, and where the machine
    has not as many. Where a process raises a `PilotfishError`, none is started again, and that error is raised here as
    a `ConfigurationError`.
    """
    if kept is None:
        raise ConfigurationError("--answers: needed a file, beside which several processes keep their training")
    resources = local_resources()
    is_gpu = torch.device(chosen.device).type == "cuda"
    most = resources.gpus if is_gpu else int(resources.cpus)
    if chosen.workers > most:
        kind = "GPUs" if is_gpu else "cores"
        raise ConfigurationError(f"--workers: {chosen.workers} is refused; this machine has {most} {kind}")
    if not ray.is_initialized():
        start_local_ray(resources)
    # Processes of Ray Train have working directories of their own.
    values = vars(chosen) | {"write_seconds": 0.0, "target": str(Path(chosen.target).resolve())}
    for name, value in values.items():
        if isinstance(value, Path):
            values[name] = value.resolve()
    values["prompts"] = [path.resolve() for path in chosen.prompts]
    refused = kept.path / _REFUSED
    refused.unlink(missing_ok=True)
    trainer = TorchTrainer(
        train_in_worker,
        train_loop_config={"options": values, "make": make, "directory": kept.path},
        scaling_config=ray_train.ScalingConfig(num_workers=chosen.workers, use_gpu=is_gpu),
        run_config=ray_train.RunConfig(
            name="ray",
            storage_path=str(kept.path),
            failure_config=ray_train.FailureConfig(max_failures=_MOST_FAILURES),
            checkpoint_config=ray_train.CheckpointConfig(num_to_keep=2),
            callbacks=[_EndsRefused(refused)],  # type: ignore[list-item] # Ray has the type of its older callbacks
        ),
    )
    try:
        trainer.fit()
    except ray_train.TrainingFailedError:
        if refused.exists():
            raise ConfigurationError(refused.read_text(encoding="utf-8")) from None
        raise


class _EndsRefused(ray_train.UserCallback):
    """Ends a training that a process refuses. Ray Train starts again what is lost, but not after an error in here."""

    def __init__(self, refused: Path) -> None:
        self._refused = refused

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:  # noqa: ARG002
        if self._refused.exists():
            raise ConfigurationError(self._refused.read_text(encoding="utf-8"))


def train_in_worker(config: dict[str, Any]) -> None:
    """What each process does. Ray Train has initialized `torch.distributed`."""
    device = get_device()
    chosen = argparse.Namespace(**config["options"])
    chosen.device = str(device)
    peers = Peers.of(dist.group.WORLD, device.type)
    make: Make = config["make"]
    kept = TrainingDirectory(config["directory"])
    try:
        run = make(chosen, None if peers.rank == 0 else _silent, peers)
        run.checkpoints, run.directory_of_training = RayCheckpoints(), kept
        run.run()
    except PilotfishError as error:
        scratch = kept.path / f"{_REFUSED}.{peers.rank}"
        scratch.write_text(str(error), encoding="utf-8")
        scratch.replace(kept.path / _REFUSED)
        raise


def _silent(_: str) -> None:
    """Only the first process tells its progress."""
