"""The choice of a model's attention backends, made once when the model is loaded.

For each kind of step, the most preferred backend is taken that supports the model, can be opened on this machine, and
agrees with the reference in a trial on this device. All ranks take the same one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from cluster.core.errors import ConfigurationError
from cluster.core.ids import BlockId
from cluster.core.kv import KvLayout
from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.forward.backends.base import (
    REFERENCE,
    AttentionBackend,
    AttentionSetting,
    BackendPlugin,
    BackendUnavailable,
    Capabilities,
    Feature,
    StepKind,
    all_backends,
)
from workers.forward.graph_buffers import GraphBuffers
from workers.forward.graph_sizes import GraphSize
from workers.forward.layout import RowShape
from workers.kv.eight_bits import record_bytes
from workers.kv.groups import AttentionWindow, KvCacheGroups, LayerPlacement
from workers.kv.spec import LayerShape
from workers.kv.store import KvStore
from workers.ranks import least_of_all_ranks

logger = logging.getLogger(__name__)

_TREE = TokenTree((1, 2, 3, 4, 5), (-1, -1, 0, 0, 3))
_SPARE_BLOCKS = 3
_MANY_TOKENS = 1100
"""More than one program reads of a row: backends divide the keys of long rows, and join what they found."""


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """The backend of one kind of step."""

    name: str
    backend: AttentionBackend[Any]
    capabilities: Capabilities


def choose_backend(
    setting: AttentionSetting, kind: StepKind, ranks: int = 1, candidates: Sequence[BackendPlugin] | None = None
) -> ChosenBackend:
    """Choose the backend for steps of one kind. `candidates` defaults to all backends, the most preferred first.

    With several `ranks`, all of them call this together.
    """
    for plugin in all_backends() if candidates is None else candidates:
        if _problem(plugin, setting, kind, ranks) is None:
            return _open(plugin, setting, kind)
    raise BackendUnavailable(f"no attention backend computes {kind.value} for this model")


def check_backend_name(name: str) -> None:
    """Raise `ConfigurationError` unless `target.attention_backend` may have this value."""
    known = backend_names()
    if name not in known:
        raise ConfigurationError(f"target.attention_backend: {name!r} is refused; it must be one of {', '.join(known)}")


def backend_names() -> tuple[str, ...]:
    """The values of the setting `target.attention_backend`."""
    return ("auto", *(plugin.name for plugin in all_backends()))


def require_backend(name: str, setting: AttentionSetting, ranks: int = 1) -> ChosenBackend:
    """The backend that `target.attention_backend` names, for steps of any size.

    With several `ranks`, all of them call this together. Raises `ConfigurationError` if there is no such backend, or if
    it cannot be used for this model on this device; the message says why, and which one `auto` takes.
    """
    check_backend_name(name)
    plugins = {plugin.name: plugin for plugin in all_backends()}
    problem = _problem(plugins[name], setting, StepKind.RAGGED, ranks)
    if problem is not None:
        instead = choose_backend(setting, StepKind.RAGGED, ranks).name
        raise ConfigurationError(
            f"target.attention_backend: {name!r} is refused, because {problem}; auto takes {instead!r}"
        )
    return _open(plugins[name], setting, StepKind.RAGGED)


def _open(plugin: BackendPlugin, setting: AttentionSetting, kind: StepKind) -> ChosenBackend:
    logger.info("attention in %s is computed by the backend %s", kind.value, plugin.name)
    return ChosenBackend(plugin.name, plugin.open(setting), plugin.capabilities)


def _problem(plugin: BackendPlugin, setting: AttentionSetting, kind: StepKind, ranks: int) -> str | None:
    """Why no rank uses the backend for steps of this kind; `None` if all of them can. Logs it."""
    problem = plugin.capabilities.problem(setting, kind)
    if problem is not None:
        logger.debug("attention backend %s is not used for %s: %s", plugin.name, kind.value, problem)
    if plugin.name == REFERENCE:
        return problem
    if problem is None:
        problem = _trial_problem(plugin, setting, kind)
    # All ranks must run the same kernels, and a rank may have more query heads of a KV head than another.
    if least_of_all_ranks(int(problem is None), ranks):
        return None
    return problem or "it cannot be used on another rank"


def _trial_problem(plugin: BackendPlugin, setting: AttentionSetting, kind: StepKind) -> str | None:
    """Why the backend is not used on this device; `None` if it agrees with the reference for all shapes of layers."""
    reference = next(one for one in all_backends() if one.name == REFERENCE)
    try:
        for shape in sorted({replace(shape, window=None) for shape in setting.layers}, key=repr):
            if not _agrees(plugin, reference, _trial_setting(setting, shape, plugin.capabilities), kind):
                problem = f"its output differs from the reference for {shape}"
                logger.warning("attention backend %s is not used on this device: %s", plugin.name, problem)
                return problem
    except BackendUnavailable as error:
        logger.info("attention backend %s is not used: %s", plugin.name, error)
        return str(error)
    except Exception as error:  # a compiler may raise anything
        logger.warning("attention backend %s is not used on this device: %r", plugin.name, error)
        return repr(error)
    return None


def _trial_rows(size: int, capabilities: Capabilities) -> list[RowShape]:
    """A tree, tokens after few and many others, and prompts, with blocks of `size` tokens anywhere in the pool."""
    shapes = [(2 * size + 3, 1, _TREE), (size, 1, EMPTY_TREE), (_MANY_TOKENS, 1, EMPTY_TREE), (0, 5, EMPTY_TREE)]
    shapes += [(size + 1, tokens, EMPTY_TREE) for tokens in capabilities.prompts]
    needed = [-(-(stored + fresh + len(tree)) // size) for stored, fresh, tree in shapes]
    order = torch.randperm(sum(needed) + _SPARE_BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()
    free: Iterator[int] = iter(order)
    return [
        RowShape([[BlockId(next(free)) for _ in range(blocks)]], stored, fresh, tree)
        for (stored, fresh, tree), blocks in zip(shapes, needed, strict=True)
    ]


def _trial_setting(setting: AttentionSetting, shape: LayerShape, capabilities: Capabilities) -> AttentionSetting:
    """Two layers of one shape over a small pool of random numbers: without a window, and with one and its sinks, unless
    the backend computes none."""
    size = setting.block_size
    window = AttentionWindow(size + 4, sinks=2 if Feature.SINKS in capabilities.features else 0)
    placements = (LayerPlacement(0, 0, AttentionWindow()), LayerPlacement(0, 0, window))
    blocks = sum(len(row.blocks[0]) for row in _trial_rows(size, capabilities)) + _SPARE_BLOCKS
    groups, stored = KvCacheGroups(KvLayout(size), placements, (shape,)), setting.store.stored
    generator = torch.Generator().manual_seed(0)
    numbers = blocks + 1, size, shape.kv_heads, shape.head_dim  # the last block is scratch
    keys, values = (torch.randn(numbers, generator=generator).to(setting.device, setting.dtype) for _ in range(2))
    nothing = keys.new_empty(0)
    if stored is None:
        store = KvStore(groups, [keys], [values if shape.latent_dim is None else nothing])
    else:
        empty = torch.zeros((blocks + 1, size, record_bytes(shape)), dtype=torch.uint8, device=setting.device)
        store = KvStore(groups, [empty], [empty.clone() if shape.latent_dim is None else nothing], stored)
        slots = torch.arange((blocks + 1) * size, device=setting.device)
        store.write(0, slots, keys.flatten(0, 1), values.flatten(0, 1))
    return replace(setting, store=store, layers=(shape, shape), blocks=blocks, relative_biases=(), has_sources=False)


@torch.inference_mode()
def _agrees(plugin: BackendPlugin, reference: BackendPlugin, setting: AttentionSetting, kind: StepKind) -> bool:
    """Whether both store the same and attend alike, up to rounding."""
    own = replace(
        setting,
        store=KvStore(
            setting.store.kv_groups,
            [keys.clone() for keys in setting.store.keys],
            [values.clone() for values in setting.store.values],
            setting.store.stored,
        ),
    )
    rows = _trial_rows(setting.block_size, plugin.capabilities)
    expected = _trial_step(reference.open(setting), setting, StepKind.RAGGED, rows)
    found = _trial_step(plugin.open(own), own, kind, rows)
    tolerance = max(8 * torch.finfo(setting.dtype).eps, 1e-3)
    stored = zip(chain(setting.store.keys, setting.store.values), chain(own.store.keys, own.store.values), strict=True)
    return all(bool((one - other).abs().max() < tolerance) for one, other in zip(expected, found, strict=True)) and all(
        torch.equal(one[: setting.blocks], other[: setting.blocks]) for one, other in stored
    )


def _trial_step(
    backend: AttentionBackend[Any], setting: AttentionSetting, kind: StepKind, rows: Sequence[RowShape]
) -> list[torch.Tensor]:
    """The results of both layers for the trial's rows, float32 `[tokens, heads, dim]`."""
    tokens = width = sum(row.width for row in rows)
    if kind is StepKind.RAGGED:
        metadata = backend.plan(rows)
    else:
        width = 2 * tokens  # some are padding
        size = GraphSize(len(rows), max(row.width for row in rows), width, setting.blocks, width)
        buffers = GraphBuffers(size, setting.store.kv_groups, setting.scratch, setting.device)
        buffers.fill(rows, range(tokens), [position for row in rows for position in row.positions()], range(tokens))
        metadata = backend.plan_padded(buffers.step())
    generator, shape = torch.Generator().manual_seed(2), setting.layers[0]
    heads = (shape.kv_heads * shape.heads_per_kv, shape.kv_heads, shape.kv_heads)
    drawn = [torch.randn((tokens, count, shape.head_dim), generator=generator) for count in heads]
    queries, keys, values = (
        torch.cat((part, part.new_zeros((width - tokens, *part.shape[1:])))).to(setting.device, setting.dtype)
        for part in drawn
    )
    if shape.latent_dim is not None:
        values = keys[..., : shape.latent_dim]
    found = []
    for layer in range(len(setting.layers)):
        backend.write(layer, keys, values, metadata)
        if shape.has_learned_sinks:
            sinks = torch.linspace(-1, 1, heads[0]).to(setting.device, setting.dtype)
            attended = backend.attend_with_sinks(layer, queries, metadata, None, sinks)
        else:
            attended = backend.attend(layer, queries, metadata, None)
        found.append(attended[:tokens].float())
    return found
