"""Fuses a model's decoder layers on GPUs, if each of them then agrees with the module's own result there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from cluster.core.ids import BlockId
from cluster.core.kv import KvLayout
from cluster.core.tree import EMPTY_TREE
from workers.forward.attention import StepPlan, bind
from workers.forward.backends.base import AttentionSetting, StepKind
from workers.forward.backends.choice import choose_backend
from workers.forward.expert_choice import ExpertChoice
from workers.forward.fused_layers import (
    fuse_layers,
    has_known_layers,
    head_norms,
    mixture_of,
    undo_fuse,
)
from workers.forward.layer_kernels import LayerKernels, TritonKernels
from workers.forward.layer_lists import decoder_layers
from workers.forward.layout import RowShape
from workers.forward.loaded_model import LoadedModel
from workers.forward.projections import Projections
from workers.kv.groups import AttentionWindow, KvCacheGroups, LayerPlacement
from workers.kv.store import KvStore
from workers.ranks import AnotherRankFailed, try_together

logger = logging.getLogger(__name__)

_ROWS = (5, 1, 3)
"""Tokens of the rows of the trial."""
_BLOCK_SIZE = 16
_COMPARED = ("output", "keys", "values", "logits of the router", "weights of the experts", "logits of the experts")


def fuse_on_gpu(model: LoadedModel) -> bool:
    """Fuse the decoder layers of a model on GPUs. Returns whether they are fused; logs why they are not.

    All ranks of the model call this together.
    """
    if model.device.type != "cuda" or model.source is not None or not has_known_layers(model.module):
        return False
    problem = fuse_if_equal(model, TritonKernels)
    if problem is None:
        logger.info("the decoder layers of model type %r are fused", model.module.config.model_type)
        return True
    logger.warning("the decoder layers of model type %r are not fused: %s", model.module.config.model_type, problem)
    return False


@torch.inference_mode()
def fuse_if_equal(model: LoadedModel, make: Callable[[], LayerKernels]) -> str | None:
    """Fuse the known layers, and undo it if one of them then differs from its module. Returns why they are not fused.

    All ranks of the model call this together, and do the same, also where one of them raises. `make` may raise
    anything.
    """
    if len({(shape.kv_heads, shape.head_dim) for shape in model.layers}) > 1:
        return "they differ in the shapes of their keys and values"
    setting = _trial_setting(model)
    backend = choose_backend(setting, StepKind.RAGGED, model.tensor_parallel).backend
    step = StepPlan(backend, backend.plan([_row(index, width) for index, width in enumerate(_ROWS)]))
    paged = bind(model.module)
    paged.step = step
    embedded = _embedded(model)  # it sums over ranks by itself
    try:
        try_together(partial(_compare, model, make, setting.store, embedded), model.tensor_parallel)
    except Exception as error:  # a compiler may raise anything
        undo_fuse(model.module)
        return str(error) if isinstance(error, _Different | AnotherRankFailed) else repr(error)
    finally:
        paged.step = None
    return None


class _Different(Exception):
    """A layer computes another result than its module, as the message says."""


def _launch_each(model: LoadedModel, kernels: LayerKernels) -> None:
    """Run each kernel of the first layer, and the attention after it, on zeros."""
    layer: Any = next(decoder_layers(model.module))
    attention, norm, shape = layer.self_attn, layer.input_layernorm, model.layers[0]
    step = attention.paged_attention.step

    def zeros(width: int) -> torch.Tensor:
        return torch.zeros((sum(_ROWS), width), dtype=model.dtype, device=model.device)

    rows = zeros(model.hidden_size)
    kernels.normalize(rows, norm.weight, norm.variance_epsilon)
    kernels.add_and_normalize(rows, rows, norm.weight, norm.variance_epsilon)
    kinds: dict[bool, Any] = {mixture_of(one) is None: one for one in decoder_layers(model.module)}
    for one in kinds.values():
        if (mixture := mixture_of(one)) is not None:
            kernels.choose(mixture.logits(rows), mixture.choice)
        else:
            width = one.mlp.up_proj.out_features
            both = zeros(2 * width)
            kernels.silu_mul(both[:, :width], both[:, width:])
    fresh = Projections(
        queries=zeros(attention.q_proj.out_features),
        keys=zeros(attention.k_proj.out_features),
        values=zeros(attention.v_proj.out_features),
        cosines=zeros(shape.head_dim),
        sines=zeros(shape.head_dim),
        dim=shape.head_dim,
        norms=head_norms(attention),
    )
    queries = step.backend.write_rotated(0, fresh, step.metadata)
    if (sinks := getattr(attention, "sinks", None)) is None:
        step.backend.attend(0, queries, step.metadata, attention.scaling)
    else:
        step.backend.attend_with_sinks(0, queries, step.metadata, attention.scaling, sinks)


def _embedded(model: LoadedModel) -> torch.Tensor:
    """The trial's rows as the layers read them, `[1, tokens, hidden]`."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.vocabulary_size, (1, sum(_ROWS)), generator=generator)
    embedded: torch.Tensor = model.module.get_input_embeddings()(tokens.to(model.device))
    return embedded


def _compare(model: LoadedModel, make: Callable[[], LayerKernels], store: KvStore, embedded: torch.Tensor) -> None:
    """Fuse the layers, and compare each with its module. Raises `_Different`, and whatever a kernel raises.

    Routers choose as the modules did: a last bit of a logit may decide between two experts. What the kernels make of
    the modules' own logits is compared by itself.
    """
    kernels = make()
    _launch_each(model, kernels)
    calls = _record(model, store, embedded)
    repeating = _RecordedChoice(kernels)
    fuse_layers(model.module, repeating)
    limit = max(2 * torch.finfo(model.dtype).eps, 1e-4)
    for index, (layer, call) in enumerate(zip(decoder_layers(model.module), calls, strict=True)):
        repeating.router = call.router
        found = [*layer(*call.arguments, **call.others), *_stored(store)]
        expected = [*call.results]
        if call.router is not None and (mixture := mixture_of(layer)) is not None:
            weights, chosen = kernels.choose(call.router.logits, mixture.choice)
            found += [repeating.logits, weights, call.router.logits.gather(-1, chosen)]
            expected += [call.router.logits, call.router.weights, call.router.logits.gather(-1, call.router.chosen)]
        for what, one, other in zip(_COMPARED[: len(found)], found, expected, strict=True):
            difference = float((one.float() - other.float()).norm() / other.float().norm())
            if not difference <= limit:
                raise _Different(f"{what} of layer {index} differ by {difference:.1e} of their size")
    undo_fuse(model.module)
    fuse_layers(model.module, kernels)


@dataclass(frozen=True, slots=True, eq=False)
class _RouterResult:
    """What a router of `transformers` returned."""

    logits: torch.Tensor  # [tokens, experts]
    weights: torch.Tensor  # [tokens, experts of a token]
    chosen: torch.Tensor


class _RecordedChoice:
    """Kernels that choose the experts that a module chose."""

    def __init__(self, kernels: LayerKernels) -> None:
        self.normalize, self.add_and_normalize = kernels.normalize, kernels.add_and_normalize
        self.silu_mul, self.product, self.begin_sum = kernels.silu_mul, kernels.product, kernels.begin_sum
        self.router: _RouterResult | None = None
        self.logits = torch.empty(0)
        """Logits of the last choice."""

    def choose(self, logits: torch.Tensor, _: ExpertChoice) -> tuple[torch.Tensor, torch.Tensor]:
        if self.router is None:
            raise RuntimeError("a layer chose experts, and its module did not")
        self.logits = logits
        return self.router.weights, self.router.chosen


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call of a layer as `transformers` wrote it."""

    arguments: tuple[Any, ...]
    others: dict[str, Any]
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Output, and all stored keys and values after it."""
    router: _RouterResult | None


def _record(model: LoadedModel, store: KvStore, embedded: torch.Tensor) -> list[_Call]:
    """Run the trial's rows through the module, and record each layer."""
    calls: list[_Call] = []
    routed: list[_RouterResult] = []

    def record(_: nn.Module, arguments: tuple[Any, ...], others: dict[str, Any], output: Any) -> None:
        calls.append(_Call(arguments, others, (output.clone(), *_stored(store)), routed.pop() if routed else None))

    positions = torch.tensor([[position for row in _ROWS for position in range(row)]])
    with ExitStack() as stack:
        for layer in decoder_layers(model.module):
            stack.callback(layer.register_forward_hook(record, with_kwargs=True).remove)
            if (mixture := mixture_of(layer)) is not None:
                hook = mixture.router.register_forward_hook(lambda _, __, found: routed.append(_RouterResult(*found)))
                stack.callback(hook.remove)
        model.module(
            inputs_embeds=embedded,
            position_ids=positions.to(model.device),
            use_cache=False,
        )
    return calls


def _stored(store: KvStore) -> tuple[torch.Tensor, torch.Tensor]:
    return store.keys[0].clone(), store.values[0].clone()


def _row(index: int, width: int) -> RowShape:
    return RowShape([[BlockId(index)]], 0, width, EMPTY_TREE)


def _trial_setting(model: LoadedModel) -> AttentionSetting:
    """One pair of tensors, which every layer writes and reads in turn."""
    shape = model.layers[0]
    placements = (LayerPlacement(0, 0, AttentionWindow()),) * len(model.layers)
    size = (len(_ROWS) + 1, _BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    keys, values = (torch.zeros(size, dtype=model.dtype, device=model.device) for _ in range(2))
    store = KvStore(KvCacheGroups(KvLayout(_BLOCK_SIZE), placements, (shape,)), [keys], [values])
    return AttentionSetting(store, model.layers, len(_ROWS), model.dtype, model.device)
