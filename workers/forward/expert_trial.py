"""Replaces the experts of mixtures on GPUs by kernels, where these agree with the layer's own result on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from workers.forward.experts import ExpertsKernel, FastExperts, is_mixture, matrices_of, part_of
from workers.forward.loaded_model import LoadedModel
from workers.forward.weights.base import NoGpuProduct
from workers.forward.weights.experts import StoredExperts, gate_of
from workers.forward.weights.floats import mxfp4_parts
from workers.ranks import found_by_all, least_of_all_ranks

logger = logging.getLogger(__name__)

Make = Callable[[Any], ExpertsKernel]
_EACH, _FEW = 4, 9
"""Experts of a token of the trial, and tokens of a step in which an expert has few."""
_MANY = 20
"""Tokens of an expert on average, in a step in which experts have many."""


def replace_experts_on_gpu(model: LoadedModel) -> None:
    """Replace the experts of a model on GPUs by Triton kernels. Logs why they stay as `transformers` made them.

    All ranks of the model call this together. Raises `NoGpuProduct` for stored ones, which nothing else multiplies
    on a GPU.
    """
    if model.device.type != "cuda":
        return
    replaced, problem = replace_experts_if_equal(model, triton_experts)
    if problem is not None and any(isinstance(part, StoredExperts) for part in model.module.modules()):
        raise NoGpuProduct(f"experts: {problem}")
    if problem is not None:
        logger.warning("experts of model type %r stay as they are: %s", model.module.config.model_type, problem)
    if replaced:
        logger.info("the experts of %d layers are multiplied by Triton kernels", replaced)


def triton_experts(layer: Any) -> ExpertsKernel:
    """The Triton kernels of a layer's experts, on its device.

    MXFP4 stays as it is stored. Raises `ImportError` without `triton`, `ValueError` for experts of another kind.
    """
    from workers.forward.triton.experts import Matrices, TritonExperts, mxfp4_matrices

    if isinstance(layer, StoredExperts):
        firsts, first_biases, seconds, second_biases = zip(
            *((one.first, one.first_bias, one.second, one.second_bias) for one in layer.experts), strict=True
        )
        sides = (firsts, first_biases), (seconds, second_biases)
        first, second = (
            mxfp4_matrices(*_stacked(map(mxfp4_parts, storages), layer.device), _biases(biases, layer.device))
            for storages, biases in sides
        )
        return TritonExperts(first, second, layer.gate)
    matrices = matrices_of(layer)
    if matrices is None:
        raise ValueError(f"{type(layer).__name__} is of another kind, or sharded in another way")
    first = Matrices(matrices.first.contiguous(), matrices.first_biases)
    return TritonExperts(first, Matrices(matrices.second.contiguous(), matrices.second_biases), gate_of(layer))


def _stacked(
    parts: Iterable[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and exponents of all experts."""
    values, exponents = zip(*parts, strict=True)
    return torch.stack(values).to(device), torch.stack(exponents).to(device)


def _biases(biases: Iterable[torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    known = [bias for bias in biases if bias is not None]
    return torch.stack(known).to(device) if known else None


@torch.inference_mode()
def replace_experts_if_equal(model: LoadedModel, make: Make) -> tuple[int, str | None]:
    """Replace the experts of each layer where the kernels agree with it.

    Returns the number of layers that were replaced, and why the next one was not. All ranks of the model call this
    together, and do the same. `make` may raise anything.
    """
    places = [
        (parent, name)
        for parent in model.module.modules()
        for name, child in parent.named_children()
        if is_mixture(child) and not isinstance(child, FastExperts)
    ]
    for count, (parent, name) in enumerate(places):
        layer = getattr(parent, name)
        fast, problem = _tried(layer, make, model)
        if fast is None:
            return count, problem
        layer._parameters.clear()  # a sharded layer refers to itself
        setattr(parent, name, fast)
    return len(places), None


def _tried(layer: Any, make: Make, model: LoadedModel) -> tuple[FastExperts | None, str | None]:
    """The kernels for a layer, or why they are not used."""
    fast: FastExperts | None = None
    problem, trials = None, []
    try:
        kernel = make(layer)
        trials = _trials(layer, model)
        for trial in trials:
            kernel.mix(*trial)  # before any collective, in which the other ranks would wait for this one
        fast = FastExperts(kernel, part_of(layer))
    except Exception as error:  # a compiler may raise anything
        problem = repr(error)
    fast = found_by_all(fast, model.tensor_parallel)
    if fast is None:
        return None, problem or "another rank cannot compute them"
    limit = max(2 * torch.finfo(model.dtype).eps, 1e-4)
    for trial in trials:
        found, expected = fast(*trial).float(), layer(*trial).float()
        difference = float((found - expected).norm() / expected.norm())
        if problem is None and not difference <= limit:
            problem = f"the sums of {type(layer).__name__} differ by {difference:.1e} of their size"
    if not least_of_all_ranks(int(problem is None), model.tensor_parallel):
        return None, problem or "they differ on another rank"
    return fast, None


def _trials(layer: Any, model: LoadedModel) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Hidden states of few and of many tokens, their experts, and the weights of these."""
    own = len(layer.experts) if isinstance(layer, StoredExperts) else layer.num_experts
    experts = part_of(layer).all_experts or own
    each = min(_EACH, experts)
    found = []
    for count in (_FEW, _MANY * experts // each):
        draw = torch.Generator().manual_seed(count)
        weights, chosen = torch.randn(count, experts, generator=draw).topk(each)
        x = torch.randn(count, model.hidden_size, generator=draw)
        x, weights = (one.to(model.device, model.dtype) for one in (x, weights.softmax(-1)))
        found.append((x, chosen.to(model.device), weights))
    return found
