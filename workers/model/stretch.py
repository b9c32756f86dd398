"""Makes a model larger without changing its function, to measure drafts where the target costs what large models cost.

`wider` adds units to the MLP of every layer. Their input weights are copies of existing units, their output weights are
zero, so they compute and contribute nothing. Hidden size, layers, attention and KV cache stay the same: drafts, heads
and taps of the original apply as they are. `deeper` adds layers whose two output projections are zero, so each adds
exactly zero to the residual stream. It also multiplies the KV cache, and taps are renumbered (`Stretch.layers`).

The rounding of `deeper` is that of the original. In `wider`, kernels may add the terms of a sum in another order.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cluster.core.errors import ModelLoadError
from workers.model.weight_counts import count_weights, tensor_shapes
from workers.model.weight_files import weight_files

WIDER, DEEPER = "wider", "deeper"
LARGEST_FACTOR = 64
STRETCH = "pilotfish_stretch.json"
"""File of a stretched model's directory that describes what was done."""
EACH_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
"""Keys of a configuration whose values are lists with one item per layer."""

_SUFFIX = re.compile(r"(?P<path>.+)@(?:(?P<kind>wider|deeper)-)?x(?P<factor>\d{1,3})")
_LAYER = re.compile(r"(?P<before>.*\blayers\.)(?P<number>\d+)(?P<after>\..+)")
_MLP = tuple(f".mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
_OUTPUTS = (".mlp.down_proj.weight", ".mlp.down_proj.bias", ".self_attn.o_proj.weight", ".self_attn.o_proj.bias")
_GRAIN = 32
"""The added units are a multiple of this number."""
_SHARD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class StretchRequest:
    """The parts of a path `PATH@x10`, `PATH@wider-x10` or `PATH@deeper-x10`."""

    path: str
    kind: str
    factor: int
    """Multiply-adds per token, relative to the original."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What was done to a model."""

    original: str
    """Name of the original's directory."""
    kind: str
    factor: int
    layers: tuple[int, ...]
    """For each layer of the original, its number in the stretched model."""
    total_layers: int
    intermediate_size: int

    def __str__(self) -> str:
        """For tables."""
        deep, wide = f"{self.total_layers} layers", f"{self.intermediate_size} MLP units in each layer"
        size = deep if self.kind == DEEPER else wide
        return (
            f"Stretched target: {self.original} made {self.kind} to {self.factor} times its cost ({size}) without a "
            "change of its function"
        )


def parse_stretch(path: str) -> StretchRequest | None:
    """The request in a model path; `None` for any other path.

    Raises `ModelLoadError` for a factor out of bounds.
    """
    found = _SUFFIX.fullmatch(path)
    if found is None:
        return None
    factor = int(found["factor"])
    if not 2 <= factor <= LARGEST_FACTOR:
        raise ModelLoadError(f"model path {path!r}: x{factor} is refused; it must be x2 to x{LARGEST_FACTOR}")
    return StretchRequest(found["path"], found["kind"] or WIDER, factor)


def read_stretch(directory: Path) -> Stretch | None:
    """What was done to the model in a directory; `None` for a model as it is."""
    file = directory / STRETCH
    if not file.is_file():
        return None
    values = json.loads(file.read_text(encoding="utf-8"))
    return Stretch(**(values | {"layers": tuple(values["layers"])}))


def stretch_model(directory: Path, destination: Path, kind: str, factor: int) -> None:
    """Write a stretched copy of a Llama-like model into the existing directory `destination`.

    Weights keep their stored type. Raises `ModelLoadError` for a model without gated MLPs of the usual names.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    plan = _plan(directory, config, kind, factor)
    changes: dict[str, Any] = {"num_hidden_layers": plan.total_layers, "intermediate_size": plan.intermediate_size}
    changes |= {
        name: [config[name][source] for source, _ in _sources(plan)]
        for name in EACH_LAYER
        if isinstance(config.get(name), list)
    }
    for file in directory.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
            shutil.copy(file, destination / file.name)
    (destination / "config.json").write_text(json.dumps(config | changes, indent=2) + "\n", encoding="utf-8")
    (destination / STRETCH).write_text(json.dumps(asdict(plan), indent=2) + "\n", encoding="utf-8")
    _write_shards(_stretched(directory, plan), destination)


def _plan(directory: Path, config: dict[str, Any], kind: str, factor: int) -> Stretch:
    shapes = tensor_shapes(directory)
    layers, inner = config.get("num_hidden_layers"), config.get("intermediate_size")
    numbers = {int(found["number"]) for name in shapes if (found := _LAYER.fullmatch(name))}
    gates = [name for name in shapes if name.endswith(_MLP)]
    if not isinstance(layers, int) or not isinstance(inner, int) or numbers != set(range(layers or 0)):
        raise ModelLoadError(f"model directory {str(directory)!r}: needed numbered layers and one intermediate_size")
    if len(gates) != 3 * layers:
        raise ModelLoadError(f"model directory {str(directory)!r}: only models with gated MLPs can be stretched")
    missing = (factor - 1) * count_weights(directory).multiply_adds
    if kind == WIDER:
        unit = sum(shape[0] * shape[1] for name, shape in shapes.items() if name in gates) // inner
        added = -(-missing // (unit * _GRAIN)) * _GRAIN
        return Stretch(directory.name, kind, factor, tuple(range(layers)), layers, inner + added)
    layer = (
        sum(shape[0] * shape[1] for name, shape in shapes.items() if _LAYER.fullmatch(name) and len(shape) == 2)
        / layers
    )
    total = layers + round(missing / layer)
    return Stretch(
        directory.name, kind, factor, tuple(index * total // layers for index in range(layers)), total, inner
    )


def _sources(plan: Stretch) -> Iterator[tuple[int, bool]]:
    """For each layer of the stretched model, the original's layer that it copies, and whether it was added."""
    source = -1
    for number in range(plan.total_layers):
        is_added = source + 1 >= len(plan.layers) or plan.layers[source + 1] != number
        source += not is_added
        yield source, is_added


def _stretched(directory: Path, plan: Stretch) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of the stretched model, layer by layer."""
    reads: dict[str, Callable[[], torch.Tensor]] = {}
    for file in weight_files(directory):
        with safe_open(file, framework="pt") as stored:
            reads.update({name: _reader(file, name) for name in stored.keys()})  # noqa: SIM118 - it is no mapping
    by_layer: dict[int, list[str]] = {}
    for name, read in reads.items():
        found = _LAYER.fullmatch(name)
        if found is None:
            yield name, read()
        else:
            by_layer.setdefault(int(found["number"]), []).append(name)
    for number, (source, is_added) in enumerate(_sources(plan)):
        for name in by_layer[source]:
            values = reads[name]()
            if is_added and name.endswith(_OUTPUTS):
                values = torch.zeros_like(values)
            yield _LAYER.sub(rf"\g<before>{number}\g<after>", name), _widened(name, values, plan.intermediate_size)


def _reader(file: Path, name: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        with safe_open(file, framework="pt") as stored:
            values: torch.Tensor = stored.get_tensor(name)
            return values

    return read


def _widened(name: str, values: torch.Tensor, size: int) -> torch.Tensor:
    """A tensor of the MLP with `size` units: inputs of the added units are copies, their outputs are zero."""
    if name.endswith(".mlp.down_proj.weight"):
        wide = values.new_zeros((values.shape[0], size))
        wide[:, : values.shape[1]] = values
        return wide
    if ".mlp.gate_proj." in name or ".mlp.up_proj." in name:
        return values[torch.arange(size) % len(values)]
    return values


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], destination: Path) -> None:
    """Write tensors into files of about a gibibyte and an index, holding one file's tensors at a time."""
    weight_map: dict[str, str] = {}
    waiting: dict[str, torch.Tensor] = {}
    total = waiting_bytes = 0

    def write() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file({name: values.contiguous() for name, values in waiting.items()}, destination / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(waiting, file))
        waiting.clear()

    for name, values in tensors:
        waiting[name] = values
        waiting_bytes += values.nbytes
        total += values.nbytes
        if waiting_bytes >= _SHARD_BYTES:
            write()
            waiting_bytes = 0
    write()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (destination / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
