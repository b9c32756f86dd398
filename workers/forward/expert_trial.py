"""Replaces the experts of mixtures on GPUs by kernels, where these agree with the layer's own result on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from workers.forward.experts import ExpertMatrices, ExpertsKernel, FastExperts, is_mixture, matrices_of
from workers.forward.loaded_model import LoadedModel
from workers.forward.weights.experts import Gate, gate_of
from workers.ranks import least_of_all_ranks

logger = logging.getLogger(__name__)

Make = Callable[[ExpertMatrices, Gate], ExpertsKernel]
_EACH, _FEW = 4, 9
"""Experts of a token of the trial, and tokens of a step in which an expert has few."""
_MANY = 20
"""Tokens of an expert on average, in a step in which experts have many."""


def replace_experts_on_gpu(model: LoadedModel) -> None:
    """Replace the experts of a model on GPUs by Triton kernels. Logs why they stay as `transformers` made them.

    All ranks of the model call this together.
    """
    if model.device.type != "cuda":
        return
    replaced, problem = replace_experts_if_equal(model, triton_experts)
    if problem is not None:
        logger.warning("experts of model type %r stay as they are: %s", model.module.config.model_type, problem)
    if replaced:
        logger.info("the experts of %d layers are multiplied by Triton kernels", replaced)


def triton_experts(matrices: ExpertMatrices, gate: Gate) -> ExpertsKernel:
    """The Triton kernels. Raises `ImportError` without `triton`."""
    from workers.forward.triton.experts import Matrices, TritonExperts

    first = Matrices(matrices.first.contiguous(), matrices.first_biases)
    return TritonExperts(first, Matrices(matrices.second.contiguous(), matrices.second_biases), gate)


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
        matrices = matrices_of(layer)
        if matrices is None:
            return count, f"{type(layer).__name__} is of another kind, or sharded in another way"
        fast, problem = _tried(layer, matrices, make, model)
        if fast is None:
            return count, problem
        layer._parameters.clear()  # a sharded layer refers to itself
        setattr(parent, name, fast)
    return len(places), None


def _tried(
    layer: Any, matrices: ExpertMatrices, make: Make, model: LoadedModel
) -> tuple[FastExperts | None, str | None]:
    """The kernels for a layer, or why they are not used."""
    experts = len(matrices.first)
    trials = [_tokens(matrices, count) for count in (_FEW, _MANY * experts // min(_EACH, experts))]
    fast: FastExperts | None = None
    problem = None
    try:
        kernel = make(matrices, gate_of(layer))
        for trial in trials:
            kernel.mix(*trial)  # before any collective, in which the other ranks would wait for this one
        fast = FastExperts(kernel, sums_ranks=matrices.is_cut)
    except Exception as error:  # a compiler may raise anything
        problem = repr(error)
    if not least_of_all_ranks(int(fast is not None), model.tensor_parallel) or fast is None:
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


def _tokens(matrices: ExpertMatrices, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states of some tokens, their experts, and the weights of these."""
    experts, _, hidden = matrices.first.shape
    draw = torch.Generator().manual_seed(count)
    weights, chosen = torch.randn(count, experts, generator=draw).topk(min(_EACH, experts))
    x = torch.randn(count, hidden, generator=draw)
    like = matrices.first
    return x.to(like), chosen.to(like.device), weights.softmax(-1).to(like)
