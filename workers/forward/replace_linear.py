"""Replaces the linear layers of a model that `transformers` loaded by faster ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from workers.forward.activations import replace_activations
from workers.forward.experts import fast_experts, is_mixture
from workers.forward.gpu_product import GpuProduct
from workers.forward.layer_lists import plan_name
from workers.forward.linear import (
    FastLinear,
    PackedKernel,
    PackedWeight,
    local_product,
    make_linear_kernel,
    merge_linears,
)
from workers.forward.weights.base import LinearKernel, NoGpuProduct, Storage, stay_apart
from workers.forward.weights.choice import store
from workers.forward.weights.modules import LINEAR_TYPES, StoredEmbedding, StoredLinear
from workers.forward.weights.plain import TiledWeight
from workers.kv.start_memory import FreedMemory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Projections of the same input, which become one product.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q", "k", "v"), ("wi_0", "wi_1"))
_READ_BY_PARENT = ("dt_proj",)
"""Layers whose weight the code around them reads, as Mamba does."""
_ROUTER = "classifier"
"""The layer of a router that reads its weight, as LongCat's does."""
_STYLES = ("colwise", "rowwise")
_How = tuple[str, str | None, torch.dtype]
"""The setting `quantization`, the directory of compiled CPU kernels, and the type of activations."""


def replace_linear_layers(model: PreTrainedModel, quantization: str = "none", directory: str | None = None) -> None:
    """Replace every linear layer and all experts by their fastest form; under tensor parallelism, by this rank's shard.

    A layer that is sharded neither by columns nor by rows stays as `transformers` made it. On CPU, activation functions
    are replaced, too: no row changes a bit of another one. `directory` keeps the compiled CPU kernels. Raises
    `NoGpuProduct` with the layer's name for a matrix that a GPU would widen in memory.
    """
    plan: dict[str, str] = model.tp_plan or {}
    types = (one.dtype for one in model.parameters() if one.is_floating_point())
    how = quantization, directory, next(types, torch.get_default_dtype())
    _replace_experts(model, how)
    replace_activations(model)  # after the experts, whose function is a part of their kernels
    embeddings = (module for module in model.modules() if isinstance(module, StoredEmbedding))
    tables = {id(module.storage): module for module in embeddings if not module.is_shared}
    # The list holds only parents: a reference to a linear layer would keep its old weights in memory.
    parents = [(path, module) for path, module in model.named_modules() if not _is_linear(module)]
    freed = FreedMemory()
    for path, parent in parents:
        for names in _SIBLINGS:
            freed.add(sum(_stored_bytes(getattr(parent, name, None)) for name in names))
            _merge(parent, path, names, plan, how)
        for name, child in list(parent.named_children()):
            if name == _ROUTER and type(getattr(child, "weight", None)) is nn.Parameter and child.weight.is_cpu:
                child.weight = nn.Parameter(child.weight.detach().as_subclass(TiledWeight), requires_grad=False)
            if name in _READ_BY_PARENT or name == _ROUTER:
                continue
            if _is_linear(child) and (style := _style(child, f"{path}.{name}", plan)) is not None:
                table = tables.get(id(getattr(child, "storage", None)))
                freed.add(_stored_bytes(child))
                fast = _replace(child, f"{path}.{name}", style, how)
                setattr(parent, name, fast)
                _share_rows(fast, table)


def has_only_fast_linears(model: nn.Module) -> bool:
    """Whether all matrices but those of embeddings are in layers that `replace_linear_layers` has replaced."""
    return not any(
        parameter.dim() > 1
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    )


def _replace_experts(model: nn.Module, how: _How) -> None:
    """Replace the experts of all mixtures. On CPU a router beside them multiplies each row by itself."""
    places = [
        (parent, name) for parent in model.modules() for name, child in parent.named_children() if is_mixture(child)
    ]
    for parent, name in places:
        layer = getattr(parent, name)
        if (fast := fast_experts(layer, how[0], how[1])) is None:
            continue
        layer._parameters.clear()  # the packed weights replace them; a sharded layer refers to itself
        setattr(parent, name, fast)
        for router in parent.children():
            for key, weight in list(router.named_parameters(recurse=False)):
                if type(weight) is nn.Parameter and weight.dim() == 2 and not _is_linear(router) and weight.is_cpu:
                    tiled = weight.detach().as_subclass(TiledWeight)
                    setattr(router, key, nn.Parameter(tiled, requires_grad=False))


def _is_linear(module: nn.Module) -> bool:
    return type(module) in LINEAR_TYPES or _is_transposed(module)


def _is_transposed(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D  # a process that finds packed weights starts seconds faster

    return isinstance(module, Conv1D)


def _style(module: nn.Module, path: str, plan: dict[str, str]) -> str | None:
    """`whole`, or how the layer is sharded; `None` for a sharding that is not supported here."""
    from torch.distributed.tensor import DTensor  # takes most of a second, as do the other imports in functions here

    if isinstance(module, StoredLinear):
        return "rowwise" if module.sums_ranks else "whole"
    if not isinstance(module.weight, DTensor):
        return "whole"
    style = plan.get(plan_name(path.removeprefix(".")))
    return style if style in _STYLES else None


def _merge(parent: nn.Module, path: str, names: tuple[str, ...], plan: dict[str, str], how: _How) -> None:
    children = [getattr(parent, name, None) for name in names]
    if not all(isinstance(child, nn.Module) and _is_linear(child) for child in children):
        return
    layers = [child for child in children if isinstance(child, nn.Module)]
    styles = [_style(layer, f"{path}.{name}", plan) for layer, name in zip(layers, names, strict=True)]
    if any(style not in ("whole", "colwise") for style in styles):
        return
    storages, biases = zip(*(own_storage(layer, how[0]) for layer in layers), strict=True)
    if len({bias is None for bias in biases}) > 1 or stay_apart(storages):
        return
    joined = storages[0].joined(storages[1:])
    bias = None if biases[0] is None else torch.cat(biases)
    product = _kernel(joined, bias, f"{path}.{names[0]}", how)
    for name, layer, fast in zip(names, layers, merge_linears(product, [one.outputs for one in storages]), strict=True):
        layer._parameters.clear()  # see `_replace_experts`
        setattr(parent, name, fast)


def _replace(layer: nn.Module, path: str, style: str, how: _How) -> FastLinear:
    is_cut = style == "rowwise"
    storage, bias = own_storage(layer, how[0], cut_inputs=is_cut)
    kernel = _kernel(storage, None if is_cut else bias, path, how)
    fast = FastLinear(kernel, storage.outputs, reduce=is_cut, bias=bias if is_cut else None)
    if isinstance(layer.weight, torch.Tensor):
        fast.weight = PackedWeight(layer.weight.dtype, torch.Size((storage.outputs, storage.inputs)))
    layer._parameters.clear()  # see `_replace_experts`
    return fast


def _stored_bytes(layer: object) -> int:
    """Bytes of a layer's matrix if it stays as it is stored."""
    return layer.storage.nbytes if isinstance(layer, StoredLinear) else 0


def _share_rows(fast: FastLinear, table: StoredEmbedding | None) -> None:
    """Let an embedding with the same matrix read the packed rows, so that memory has the matrix once."""
    product = local_product(fast)
    kernel = None if product is None else product.kernel
    if table is None:
        return
    if isinstance(kernel, PackedKernel) and kernel.packed.has_rows:
        table.share(kernel.packed.rows)
    elif isinstance(kernel, GpuProduct):
        table.share(kernel.matrix.rows)


def _kernel(storage: Storage, bias: torch.Tensor | None, path: str, how: _How) -> LinearKernel:
    """The fastest kernel of the layer at `path`. Raises `NoGpuProduct` with its name."""
    try:
        return make_linear_kernel(storage, bias, how[1], how[2])
    except NoGpuProduct as error:
        raise NoGpuProduct(f"{path.removeprefix('.')}: {error}") from error


def own_storage(
    layer: nn.Module, quantization: str, *, cut_inputs: bool = False
) -> tuple[Storage, torch.Tensor | None]:
    """This rank's matrix in its storage, and its bias `[out]`. `cut_inputs`: see `store`."""
    from torch.distributed.tensor import DTensor

    weight, bias = (
        value.to_local() if isinstance(value, DTensor) else value
        for value in (layer.weight, getattr(layer, "bias", None))
    )
    own_bias = bias.detach() if isinstance(bias, torch.Tensor) else None
    if isinstance(layer, StoredLinear):
        return layer.storage, own_bias
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"{type(layer).__name__} has no weight")
    weight = weight.detach()
    return store(weight.t() if _is_transposed(layer) else weight, quantization, cut_inputs=cut_inputs), own_bias
