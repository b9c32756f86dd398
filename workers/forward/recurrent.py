"""Recurrent and convolutional layers over the states of sequences.

The modules of `transformers` (gated delta rule, Mamba, short convolution) read and write their state through a cache.
Where our own recurrences compute the same (`workers.forward.recurrence`), they compute all tokens of a step at once.
Otherwise each module is called with one token of one row at a time and with a cache that holds that row's state, so
every token is computed by the same recurrent code, whether it is part of a prompt, alone, or a node of a draft tree,
and no row's bits depend on its neighbours. A node continues from the state of its parent. The linear layers before and
after the state are computed for all tokens at once: they read their weights once a step.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from math import expm1, inf, log
from typing import Any

import torch
from torch import nn

from cluster.core.tree import EMPTY_TREE, TokenTree
from workers.forward.attention import UnsupportedModel
from workers.forward.linear import FastLinear, MergedLinear
from workers.forward.recurrence.base import RecurrenceKernels
from workers.forward.recurrence.mixers import Mixer, make_mixer
from workers.forward.recurrence.plan import RecurrencePlan, StateRow, plan_recurrence
from workers.forward.weights.modules import StoredLinear
from workers.kv.state_slots import LayerState, StatePart, StateShape
from workers.kv.states import SequenceStates
from workers.ranks import found_by_all

logger = logging.getLogger(__name__)

CACHE_NAMES = ("cache_params", "past_key_values")
"""How modules of `transformers` call the argument with their state."""
_INPUT = "hidden_states"
_OPTIONAL = {"attention_mask", "cache_position", "kwargs", "use_cache"}
"""Further arguments that change nothing for a single token without padding."""

Parts = dict[int, torch.Tensor]


class _RowCache:
    """One layer's state of one row, as the modules of `transformers` ask for it. It is changed in place."""

    def __init__(self, convolution: Parts, recurrent: Parts) -> None:
        self.convolution = convolution
        self.recurrent = recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:  # noqa: ARG002
        return self.convolution.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:  # noqa: ARG002
        return self.recurrent.get(state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:  # noqa: ARG002
        return bool(self.convolution or self.recurrent)

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        return False

    def update_conv_state(
        self,
        new: torch.Tensor,
        layer_idx: int,  # noqa: ARG002
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Append `new` `[1, channels, tokens]`. Returns the state before it and `new` together."""
        if state_idx not in self.convolution:
            width = new.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.convolution[state_idx] = new.new_zeros((*new.shape[:-1], width))
        stored = self.convolution[state_idx]
        both = torch.cat([stored, new], dim=-1)
        stored.copy_(both[..., -stored.shape[-1] :])
        return both

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:  # noqa: ARG002
        """Replace the state by `new`."""
        if state_idx not in self.recurrent:
            self.recurrent[state_idx] = torch.zeros_like(new)
        return self.recurrent[state_idx].copy_(new)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The convolutional and the recurrent parts of a layer's state, by the numbers that the module gives them."""

    convolution: tuple[int, ...]
    recurrent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Projections:
    """Linear layers of a module that do not wait for its state, so that all tokens of a step are computed at once."""

    inputs: tuple[tuple[str, float], ...] = ()
    """Names of those that read the module's inputs, each with the factor of these."""
    output: str | None = None
    """The one whose product is the module's output."""


class RecurrentLayers:
    """Shared by the recurrent modules of a model. The runner sets `plan` and `states` for each forward pass."""

    def __init__(self) -> None:
        self.plan: RecurrencePlan | None = None
        """While `None`, the modules compute as they do in a dense pass."""
        self.states: dict[int, LayerState] = {}
        """The slots of each layer."""
        self.is_probed = False
        self.shapes: dict[int, StateShape] = {}
        """The state of each layer, measured while `is_probed` is set."""
        self.mixers: dict[int, Mixer] = {}
        """What computes a layer in place of its module's own code."""
        self.parts: list[Recurrent] = []
        self._keys: dict[int, _Keys] = {}
        self._projections: dict[int, _Projections] = {}
        self._tokens: dict[int, torch.Tensor] = {}

    def run(self, part: Recurrent, hidden: torch.Tensor, plan: RecurrencePlan) -> torch.Tensor:
        """Compute all rows' tokens, `[1, tokens, hidden]` → `[1, tokens, hidden]`, and keep the states after them."""
        mixer, states = self.mixers.get(part.layer), self.states[part.layer]
        return (partial(self.compute_each, part) if mixer is None else mixer.compute)(hidden, states, plan)

    def compute_each(
        self, part: Recurrent, hidden: torch.Tensor, states: LayerState, plan: RecurrencePlan
    ) -> torch.Tensor:
        """Compute as `Mixer.compute` does, by the module's own code for one token after another."""
        with _computed_at_once(part.module, self._projections[part.layer], hidden) as products:
            together = torch.cat(self.advance(part, hidden, products, states, plan), dim=1)
        name = self._projections[part.layer].output
        return together if name is None else getattr(part.module, name)(together)

    def advance(
        self, part: Recurrent, hidden: torch.Tensor, products: Products, states: LayerState, plan: RecurrencePlan
    ) -> list[torch.Tensor]:
        """Advance the states by all rows' tokens, one after another. Returns the module's output for each of them."""
        outputs: list[torch.Tensor] = []
        state: LayerState = ()
        for token, (source, target) in enumerate(plan.moves):
            if source >= 0:
                state = tuple(slots[source : source + 1].clone() for slots in states)
            products.index = token
            outputs.append(part.own(hidden[:, token : token + 1], **{part.cache: self._cache(part.layer, state)}))
            if target >= 0:
                for slots, one in zip(states, state, strict=True):
                    slots[target] = one[0]
        return outputs

    def use_mixer(self, part: Recurrent, kernels: RecurrenceKernels, ranks: int) -> str | None:
        """Compute the module's layer by `kernels` if the results are then the same. Returns why it is not.

        All ranks call this together, and do the same: each computes the whole layer, so its bits must be the others'.
        """
        mixer = None
        try:
            mixer = make_mixer(part.module, kernels)
            problem = self._problem(part, mixer)
        except Exception as error:  # a compiler may raise anything, and so may a family that fits a kind by names only
            problem = repr(error)
        mixer = found_by_all(mixer if problem is None else None, ranks)
        if mixer is None:
            return problem or f"{type(part.module).__name__} differs on another rank"
        self.mixers[part.layer] = mixer
        return None

    def _problem(self, part: Recurrent, mixer: Mixer | None) -> str | None:
        """Why the mixer cannot stand for the module."""
        name, shape = type(part.module).__name__, self.shapes[part.layer]
        if mixer is None:
            return f"{name} is of no known kind"
        if any(state.dtype is not torch.float32 for state in shape.parts[1:]):
            return f"{name} keeps its state in {shape.parts[-1].dtype}"
        return difference(mixer, partial(self.compute_each, part), shape, self._tokens[part.layer])

    def measure_like(self, other: RecurrentLayers) -> None:
        """Take the measures of the same layers of another module."""
        self._keys, self._projections, self.shapes = other._keys, other._projections, other.shapes

    def measure(self, part: Recurrent, hidden: torch.Tensor) -> None:
        """Record the shape of the layer's state, from one token. Raises `UnsupportedModel` if it keeps none there."""
        cache = _RowCache({}, {})
        token = torch.linspace(-1, 1, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)[None, None]
        calls: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        hooks = [
            child.register_forward_hook(lambda _, given, made, name=name: calls.append((name, given[0], made)))
            for name, child in part.module.named_children()
            if isinstance(child, nn.Linear | FastLinear | MergedLinear | StoredLinear)
        ]
        try:
            result = part.own(token, **{part.cache: cache})
        finally:
            for hook in hooks:
                hook.remove()
        tensors = (*cache.convolution.values(), *cache.recurrent.values())
        if not tensors:
            raise UnsupportedModel(f"layer {part.layer} keeps its state where only its own code knows")
        self._tokens[part.layer] = token
        self._keys[part.layer] = _Keys(tuple(cache.convolution), tuple(cache.recurrent))
        self._projections[part.layer] = _find_projections(part.module, token, calls, result)
        self.shapes[part.layer] = StateShape(
            part.layer, tuple(StatePart(tuple(one.shape[1:]), one.dtype) for one in tensors)
        )

    def _cache(self, layer: int, state: LayerState) -> _RowCache:
        keys = self._keys[layer]
        count = len(keys.convolution)
        return _RowCache(
            dict(zip(keys.convolution, state[:count], strict=True)),
            dict(zip(keys.recurrent, state[count:], strict=True)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Recurrent:
    """A recurrent module."""

    module: nn.Module
    layer: int
    cache: str
    """The name of the argument with its state."""
    own: Callable[..., Any]
    """The forward pass of the module itself."""


def _find_projections(
    module: nn.Module, token: torch.Tensor, calls: Sequence[tuple[str, torch.Tensor, torch.Tensor]], result: Any
) -> _Projections:
    """The linear layers that read the inputs of a module alone, and the one that makes its output, each called once."""
    once = [call for call in calls if [name for name, _, _ in calls].count(call[0]) == 1]
    factors = (1.0, float(getattr(module, "ssm_in_multiplier", 1.0)))  # Falcon-H1 scales the inputs
    inputs = [
        (name, factor)
        for name, given, _ in once
        if (factor := next((one for one in factors if torch.equal(given, token * one)), None)) is not None
    ]
    known = {name for name, _ in inputs}
    output = next((name for name, _, made in once if made is result and name not in known), None)
    return _Projections(tuple(inputs), output)


class Products:
    """The products of a module's linear layers for all tokens, of which it gets those of one."""

    index = 0


@contextmanager
def _computed_at_once(module: nn.Module, projections: _Projections, hidden: torch.Tensor) -> Iterator[Products]:
    """Inside, these layers return what was computed for all tokens: it does not depend on the states between them."""
    products = Products()

    def part_of(values: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda _: values[:, products.index : products.index + 1]

    replaced: dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]] = {}
    for name, factor in projections.inputs:
        child = getattr(module, name)
        replaced[child] = part_of(child(hidden if factor == 1 else hidden * factor))
    if projections.output is not None:
        replaced[getattr(module, projections.output)] = lambda values: values
    before = {child: vars(child).get("forward") for child in replaced}
    try:
        for child, forward in replaced.items():
            child.forward = forward
        yield products
    finally:
        for child, own in before.items():
            del child.forward
            if own is not None:
                child.forward = own


def bind_recurrent(module: nn.Module) -> RecurrentLayers | None:
    """Let the model's recurrent modules compute over the states of sequences. `None` if it has no such module.

    Binding again returns what was bound before.
    """
    found = [part for part in module.modules() if cache_name(part) is not None]
    if not found:
        return None
    for part in found:
        _bound_time_steps(part)
    known = getattr(found[0], "recurrent_layers", None)
    if isinstance(known, RecurrentLayers):
        return known
    layers = RecurrentLayers()
    for part in found:
        _wrap(part, layers)
    return layers


@torch.inference_mode()
def use_recurrences(module: nn.Module, kernels: RecurrenceKernels, ranks: int) -> bool:
    """Compute the recurrent layers of a measured model by `kernels`, where a trial gives what the module gives.

    All ranks of the model call this together with kernels of one kind, and use them for the same layers. Returns
    whether they compute all of them.
    """
    layers = bind_recurrent(module)
    if layers is None:
        return True
    problems = [problem for part in layers.parts if (problem := layers.use_mixer(part, kernels, ranks)) is not None]
    logger.info("%d of %d recurrent layers compute all tokens at once", len(layers.mixers), len(layers.parts))
    for problem in sorted(set(problems)):
        logger.warning("recurrent layers compute one token after another: %s", problem)
    return not problems


def _wrap(module: nn.Module, layers: RecurrentLayers) -> None:
    part = Recurrent(module, int(module.layer_idx), str(cache_name(module)), module.forward)  # type: ignore[arg-type]

    @wraps(part.own)
    def forward(hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if layers.plan is not None:
            return layers.run(part, hidden_states, layers.plan)
        if layers.is_probed:
            layers.measure(part, hidden_states)
        return part.own(hidden_states, *arguments, **named)

    layers.parts.append(part)
    module.recurrent_layers = layers  # type: ignore[assignment]
    module.forward = forward


def _bound_time_steps(part: Any) -> None:
    """Bound the time steps of a Mamba-2 module for single tokens as its dense pass does.

    There `softplus(step + dt_bias)` is clamped to `time_step_limit`; the code of `transformers` for a single token
    omits it. The steps are the last columns of the input projection, where the bounds are those of `softplus`' inverse.
    """
    least, most = getattr(part, "time_step_limit", None) or (0.0, inf)
    if (least <= 0 and most == inf) or not hasattr(part, "in_proj") or hasattr(part.in_proj, "has_bounded_steps"):
        return

    def bounded(_: nn.Module, __: Any, projected: torch.Tensor) -> torch.Tensor:
        bias = part.dt_bias.float()
        lower = (log(expm1(least)) if least > 0 else -inf) - bias
        upper = (log(expm1(most)) if most < inf else inf) - bias
        steps = projected[..., -part.num_heads :]
        clamped = steps.float().clamp(lower, upper).to(steps.dtype)
        return torch.cat([projected[..., : -part.num_heads], clamped], dim=-1)

    part.in_proj.register_forward_hook(bounded)
    part.in_proj.has_bounded_steps = True


def cache_name(part: nn.Module) -> str | None:
    """The argument that gives a recurrent module its state; `None` for any other module.

    Such a module has a number, a convolution over the sequence, and nothing else that it reads but its inputs.
    """
    if not hasattr(part, "layer_idx") or not any(isinstance(child, nn.Conv1d) for child in part.children()):
        return None
    names = inspect.signature(type(part).forward).parameters.keys() - {"self"}
    caches = [name for name in CACHE_NAMES if name in names]
    if len(caches) != 1 or _INPUT not in names or names - {_INPUT, *caches} - _OPTIONAL:
        return None
    return caches[0]


_TREE = TokenTree((0, 1, 2, 3), (-1, 0, 0, -1))
_SLOTS = 7
_BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Largest difference of a result from the module's, of its largest number."""

Compute = Callable[[torch.Tensor, LayerState, RecurrencePlan], torch.Tensor]
"""What `Mixer.compute` does."""


def difference(mixer: Mixer, own: Compute, shape: StateShape, hidden: torch.Tensor) -> str | None:
    """How the mixer differs from its module on tokens of two rows, one with a tree; `None` if it does not.

    `own` computes as the module does. `hidden` `[1, tokens, hidden]` gives width, type and device.
    """
    draw = torch.Generator().manual_seed(0)
    outputs: list[torch.Tensor] = []
    states = [shape.slots(1 + _SLOTS, hidden.device) for _ in range(2)]
    for committed, slots, tree in ((0, [1, 2, 3, 4, 5], _TREE), (1, [6], EMPTY_TREE)):
        rows = (
            StateRow(2, EMPTY_TREE, SequenceStates(committed=committed, fresh=[7])),
            StateRow(3, tree, SequenceStates(committed=committed, fresh=slots)),
        )
        plan = plan_recurrence(rows, hidden.device)
        tokens = torch.randn((1, len(plan.moves), hidden.shape[-1]), generator=draw).to(hidden)
        outputs += [compute(tokens, of, plan) for compute, of in zip((mixer.compute, own), states, strict=True)]
    found = [(f"output {index // 2}", outputs[index], outputs[index + 1]) for index in (0, 2)]
    found += [(f"state {part}", mine, wanted) for part, (mine, wanted) in enumerate(zip(*states, strict=True))]
    for name, mine, wanted in found:
        gap, most = (mine.float() - wanted.float()).abs().max(), wanted.float().abs().max()
        if not bool(gap <= _BOUNDS.get(hidden.dtype, 0.0) * most):  # also for NaN
            return f"{name} differs by {float(gap):.2g} of {float(most):.2g}"
    return None
