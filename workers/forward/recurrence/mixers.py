"""Recurrent modules of `transformers` over all tokens of a step: their projections and norms around our recurrences.

A module's kind is told by what it has; a trial against the module's own code (`workers.forward.recurrent`)
shows whether it is that kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from workers.forward.recurrence.base import DeltaInputs, RecurrenceKernels, SpaceInputs
from workers.forward.recurrence.plan import RecurrencePlan
from workers.forward.weights.choice import store
from workers.forward.weights.experts import gated_rows
from workers.kv.state_slots import LayerState

_SILU = ("silu", "swish")


class Mixer(Protocol):
    """A recurrent module over all tokens of a step. Holds what it computes of the weights, which must not change."""

    def compute(self, hidden: torch.Tensor, states: LayerState, plan: RecurrencePlan) -> torch.Tensor:
        """`[1, tokens, hidden]` → the module's output of the same shape. Reads and writes the layer's slots."""


class _Convolution:
    """The causal convolution of a module, by the kernels."""

    def __init__(self, module: Any, own: Any, kernels: RecurrenceKernels) -> None:
        self._weight, self._bias = own.weight.squeeze(1), own.bias
        name = getattr(module, "activation", None)
        self._activation = "silu" if name in _SILU else name
        self._kernels = kernels

    def __call__(self, inputs: torch.Tensor, states: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        """`[tokens, channels]` → the same."""
        return self._kernels.convolution(inputs, self._weight, self._bias, states, plan, self._activation)


class GatedDeltaMixer:
    """Gated delta rule of Qwen3-Next, Qwen3.5 and OLMo Hybrid."""

    def __init__(self, module: Any, kernels: RecurrenceKernels) -> None:
        self._module, self._kernels = module, kernels
        self._convolution = _Convolution(module, module.conv1d, kernels)
        self._decay = -module.A_log.float().exp()
        self._norm, self._output = (
            (module.norm, module.out_proj) if hasattr(module, "norm") else (module.o_norm, module.o_proj)
        )
        self._most = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0

    def compute(self, hidden: torch.Tensor, states: LayerState, plan: RecurrencePlan) -> torch.Tensor:
        """The output of a module with the gated delta rule, `[1, tokens, hidden]`, over the slots of its layer."""
        module: Any = self._module
        mixed, gate, b, a = (values.flatten(2)[0] for values in self._projected(hidden))
        mixed = self._convolution(mixed, states[0], plan)
        query, key, value = torch.split(mixed, [module.key_dim, module.key_dim, module.value_dim], dim=-1)
        value = value.view(len(mixed), -1, module.head_v_dim)
        query, key = (self._normalized(one, value.shape[1]) for one in (query, key))
        decay = self._decay * rowwise(lambda rows: functional.softplus(rows.float() + module.dt_bias), a)
        beta = rowwise(torch.sigmoid, b).float() * self._most
        of = DeltaInputs(query / module.head_k_dim**0.5, key, value, decay, beta)
        output = self._kernels.gated_delta_rule(of, states[1], plan)
        normalized = _gated_norm(self._norm, output, gate.view(output.shape))
        result: torch.Tensor = self._output(normalized.reshape(1, len(mixed), -1))
        return result

    def _projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Inputs of the convolution, and the gate, b and a, each `[1, tokens, …]`."""
        module: Any = self._module
        if hasattr(module, "in_proj_qkvz"):
            projected = module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
            query, key, value, gate, b, a = module.fix_query_key_value_ordering(*projected)
            return torch.cat([one.flatten(2) for one in (query, key, value)], dim=-1), gate, b, a
        if hasattr(module, "in_proj_qkv"):
            names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            return tuple(getattr(module, name)(hidden) for name in names)
        mixed = torch.cat([module.q_proj(hidden), module.k_proj(hidden), module.v_proj(hidden)], dim=-1)
        return mixed, module.g_proj(hidden), module.b_proj(hidden), module.a_proj(hidden)

    def _normalized(self, values: torch.Tensor, heads: int) -> torch.Tensor:
        """Queries or keys `[tokens, channels]` → float32 `[tokens, heads, key_dim]` of length one."""
        values = values.view(len(values), -1, self._module.head_k_dim).float()
        values = values * torch.rsqrt((values * values).sum(-1, keepdim=True) + 1e-6)
        return values.repeat_interleave(heads // values.shape[1], dim=1)


class Mamba2Mixer:
    """Mamba-2 of Falcon-H1, Nemotron-H, Bamba, Granite 4 and Zamba2."""

    def __init__(self, module: Any, kernels: RecurrenceKernels) -> None:
        self._module, self._kernels = module, kernels
        self._convolution = _Convolution(module, module.conv1d, kernels)
        self._a, self._d = -module.A_log.float().exp(), module.D.float()
        self._bounds = getattr(module, "time_step_limit", None) or (0.0, float("inf"))
        self._gates_alone = not getattr(module, "mamba_rms_norm", True)

    def compute(self, hidden: torch.Tensor, states: LayerState, plan: RecurrencePlan) -> torch.Tensor:
        """The output of a Mamba-2 module, `[1, tokens, hidden]`, over the slots of its layer."""
        module: Any = self._module
        if hasattr(module, "ssm_in_multiplier"):
            hidden = hidden * module.ssm_in_multiplier
        projected = module.in_proj(hidden)[0]
        if hasattr(module, "mup_vector"):
            projected = projected * module.mup_vector.view(-1)
        inner, groups, size = module.intermediate_size, module.n_groups, module.ssm_state_size
        gate, mixed, steps = projected.split([inner, module.conv_dim, module.num_heads], dim=-1)
        mixed = self._convolution(mixed, states[0], plan)
        inputs, b, c = torch.split(mixed, [inner, groups * size, groups * size], dim=-1)
        steps = rowwise(lambda rows: functional.softplus(rows + module.dt_bias.to(rows.dtype)), steps).float()
        of = SpaceInputs(
            inputs.view(len(mixed), -1, module.head_dim),
            steps.clamp(*self._bounds),
            self._a,
            b.view(len(mixed), groups, -1),
            c.view(len(mixed), groups, -1),
            self._d,
        )
        output = self._kernels.state_space(of, states[1], plan).flatten(1)
        if self._gates_alone:
            output = output * rowwise(functional.silu, gate)
        else:
            output = _gated_norm(module.norm, output, gate)
        result: torch.Tensor = module.out_proj(output[None].to(hidden.dtype))
        return result


class MambaMixer:
    """Mamba, and that of Jamba and Falcon Mamba with norms: each channel has its own decays."""

    def __init__(self, module: Any, kernels: RecurrenceKernels) -> None:
        self._module, self._kernels = module, kernels
        self._convolution = _Convolution(module, module.conv1d, kernels)
        self._a, self._d = -module.A_log.float().exp(), module.D.float()
        self._steps = store(module.dt_proj.weight.detach()).kernel(None)
        names = ("dt_layernorm", "b_layernorm", "c_layernorm")
        self._norms = [getattr(module, name, nn.Identity()) for name in names]

    def compute(self, hidden: torch.Tensor, states: LayerState, plan: RecurrencePlan) -> torch.Tensor:
        """The output of a Mamba-1 module, `[1, tokens, hidden]`, over the slots of its layer."""
        module: Any = self._module
        inputs, gate = module.in_proj(hidden)[0].chunk(2, dim=-1)
        inputs = self._convolution(inputs, states[0], plan)
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        steps, b, c = module.x_proj(inputs[None])[0].split(sizes, dim=-1)
        steps, b, c = (norm(part) for norm, part in zip(self._norms, (steps, b, c), strict=True))
        bias = module.dt_proj.bias
        steps = rowwise(lambda rows: functional.softplus(rows + bias.to(rows.dtype)), self._steps.multiply(steps))
        of = SpaceInputs(inputs[..., None], steps.float(), self._a, b[:, None], c[:, None], self._d)
        output = self._kernels.state_space(of, states[1][:, :, None], plan)[..., 0]
        result: torch.Tensor = module.out_proj((output * rowwise(functional.silu, gate))[None])
        return result


class ShortConvolutionMixer:
    """The gated short convolutions of LFM2."""

    def __init__(self, module: Any, kernels: RecurrenceKernels) -> None:
        self._module = module
        self._convolution = _Convolution(module, module.conv, kernels)

    def compute(self, hidden: torch.Tensor, states: LayerState, plan: RecurrencePlan) -> torch.Tensor:
        """The output of a module with a short convolution, `[1, tokens, hidden]`, over the slots of its layer."""
        module: Any = self._module
        b, c, inputs = module.in_proj(hidden)[0].chunk(3, dim=-1)
        result: torch.Tensor = module.out_proj((c * self._convolution(b * inputs, states[0], plan))[None])
        return result


_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any, RecurrenceKernels], Mixer]], ...] = (
    (("conv1d", "A_log", "dt_bias", "head_k_dim", "head_v_dim", "key_dim", "value_dim"), GatedDeltaMixer),
    (("conv1d", "A_log", "dt_bias", "D", "in_proj", "out_proj", "n_groups", "conv_dim", "norm"), Mamba2Mixer),
    (("conv1d", "A_log", "D", "x_proj", "dt_proj"), MambaMixer),
    (("conv", "in_proj", "out_proj"), ShortConvolutionMixer),
)
"""What a module of each kind has. The first kind that fits is tried."""


def make_mixer(module: nn.Module, kernels: RecurrenceKernels) -> Mixer | None:
    """The mixer of a recurrent module; `None` for a kind that is not known."""
    for names, make in _KINDS:
        if all(hasattr(module, name) for name in names):
            known = getattr(module, "activation", None) in (None, *_SILU)
            return make(module, kernels) if known else None
    return None


def rowwise(function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """A function of single numbers, or of whole rows, of `[…, numbers]`: no row's bits depend on the other rows."""
    rows = values.reshape(-1, values.shape[-1])
    found = gated_rows(function, rows, rows.shape[-1])
    return found.view(*values.shape[:-1], found.shape[-1])


def _gated_norm(norm: Any, values: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """A norm with a gate, of rows `[…, numbers]`."""
    return rowwise(lambda rows: norm(*rows.chunk(2, dim=-1)), torch.cat([values, gate], dim=-1))
