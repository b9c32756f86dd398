"""What the layers of a model ask of attention, recorded in a forward pass that computes none.

Models of `transformers` hand their masks, windows and other arguments to the attention function. The paged one derives
its masks from the step, so what a model asks for is read here once, when it is loaded. Whatever the paged attention
would not compute is refused by name: ignored, it would give other text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.masking_utils import eager_mask

from workers.forward.adapters.offset_positions import longest
from workers.forward.adapters.registry import adapt, needs_positions
from workers.forward.attention import AttentionCall, UnsupportedModel, bind, paged_attention_forward
from workers.forward.latent_heads import latent_heads
from workers.forward.layer_lists import decoder_layers
from workers.forward.recurrent import CACHE_NAMES, RecurrentLayers, bind_recurrent, cache_name
from workers.kv.spec import TOKENS_ALONE, LayerShape
from workers.kv.state_slots import StateShape

PROBE_NAME = "pilotfish_probe"
"""Name of the attention and of the masks with `transformers` while a model is probed."""
_HARMLESS = {"position_ids"}
"""Tensors that models pass to attention and that only other attention functions read."""
_WIDTH = 4
"""Tokens of the probe's pass: enough to tell a causal mask."""
_COUNTS_ITSELF = "its forward pass takes no position_ids, so it counts positions inside each step"
_HIDDEN = -1e4
"""An additive mask hides a position by a number below this."""

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, query, key) → whether the query sees the key, element by element."""


@dataclass(frozen=True, slots=True)
class SeenPositions:
    """The positions that the query at a position `p` sees, up to its own."""

    window: int | None = None
    """Only the last so many."""
    chunk: int | None = None
    """Only those of its own chunk: from `p // chunk * chunk` on."""


@dataclass(slots=True)
class AttentionProbe:
    """The layers of one forward pass over a few tokens at the positions 0, 1, …"""

    max_context_len: int
    """Longest sequence of the model, in tokens."""
    layers: dict[int, LayerShape] = field(default_factory=dict)
    bounds: dict[str, int] = field(default_factory=dict)
    """Longest sequences, in tokens, that the paged attention computes right, by what a longer one would meet."""
    counter: _Counter | None = None
    _sources: set[int] = field(default_factory=set)
    _masks: dict[int, tuple[torch.Tensor, SeenPositions | UnsupportedModel]] = field(default_factory=dict)

    def record(self, module: nn.Module, call: AttentionCall, *, reads_source: bool) -> None:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        heads, kv_heads = call.query.shape[1], call.key.shape[1]
        unread = [name for name, value in sorted(call.others.items()) if _is_read_elsewhere(name, value)]
        if unread:
            raise UnsupportedModel(f"layer {layer} passes {', '.join(unread)} to attention, which nothing reads")
        if call.value.shape[:3] != call.key.shape[:3]:
            raise UnsupportedModel(
                f"the values of layer {layer} have the shape {tuple(call.value.shape[1:])} and its keys "
                f"{tuple(call.key.shape[1:])}; they must have as many heads and tokens"
            )
        if heads % kv_heads or call.query.shape[3] != call.key.shape[3]:
            raise UnsupportedModel(f"layer {layer}: {heads} query heads do not fit {kv_heads} KV heads")
        width = max(call.key.shape[3], call.value.shape[3])
        latent = call.value.shape[3] if latent_heads(module) is not None else None
        if layer in (self._sources if reads_source else self.layers):
            raise UnsupportedModel(f"layer {layer} attends twice in a pass, and would overwrite its keys and values")
        if reads_source:
            self._check_source(layer, LayerShape(kv_heads, width, None, heads // kv_heads, call.soft_cap))
            return
        self._check_counting(module, layer)
        seen = self._seen(module, layer, call)
        if seen.chunk is not None:
            self._bound("its layers attend in chunks", seen.chunk)
        self.layers[layer] = LayerShape(
            kv_heads, width, seen.window, heads // kv_heads, call.soft_cap, call.has_sinks, latent, call.alibi_slopes
        )

    def _check_counting(self, module: nn.Module, layer: int) -> None:
        if self.counter is None or not self.counter.has_counted:
            return
        # Llama 4 scales queries by log(1 + (position + 1) // floor_scale), with positions that each step counts anew.
        floor = getattr(module, "floor_scale", None)
        if floor is None:
            raise UnsupportedModel(f"layer {layer} counts positions inside a step instead of reading the step's")
        self._bound("its layers scale queries by positions that they count inside a step", int(floor) - 1)

    def _bound(self, why: str, length: int) -> None:
        self.bounds[why] = min(length, self.bounds.get(why, length))

    def _check_source(self, layer: int, shape: LayerShape) -> None:
        self._sources.add(layer)
        own = self.layers.get(layer)
        if own is None or replace(own, window=None) != shape:
            raise UnsupportedModel(
                f"decoder layer {layer}: its cross-attention has the shape {shape}, which is refused; it must be that "
                f"of its self-attention, {own}"
            )

    def make_mask(self, mask_function: MaskFunction, local_size: int | None, **sizes: Any) -> torch.Tensor:
        """The mask that a model asks for, as its own attention reads it. Its meaning is kept."""
        mask: torch.Tensor = eager_mask(mask_function=mask_function, **sizes)
        seen: SeenPositions | UnsupportedModel
        try:
            seen = read_mask(mask_function, self.max_context_len, local_size, sizes["device"])
        except UnsupportedModel as error:  # only a layer that attends through it is wrong
            seen = error
        except Exception as error:  # a function of a family may raise anything
            seen = UnsupportedModel(f"its mask cannot be read beyond a pass: {error}")
        self._masks[id(mask)] = mask, seen
        return mask

    def _seen(self, module: nn.Module, layer: int, call: AttentionCall) -> SeenPositions:
        if call.mask is None:
            if not getattr(module, "is_causal", True) or call.others.get("is_causal") is False:
                raise UnsupportedModel(f"layer {layer} is not causal: tokens see later ones")
            return SeenPositions(call.window)
        _, seen = self._masks.get(id(call.mask), (None, None))
        if isinstance(seen, UnsupportedModel):
            raise seen
        if seen is not None:
            return seen
        if not _is_causal_mask(call.mask):
            raise UnsupportedModel(f"layer {layer} attends through a mask of the model's own making")
        return SeenPositions(call.window)


_probing: ContextVar[AttentionProbe | None] = ContextVar("probing", default=None)


def _probed_mask(*, mask_function: MaskFunction, local_size: int | None = None, **sizes: Any) -> torch.Tensor:
    probe = _probing.get()
    if probe is None:
        raise RuntimeError("a mask was asked for outside the probe")
    return probe.make_mask(mask_function, local_size, **sizes)


@dataclass(frozen=True, slots=True)
class MeasuredLayers:
    """What a model asks of the KV pool and of attention."""

    layers: tuple[LayerShape, ...]
    bounds: dict[str, int]
    """See `AttentionProbe.bounds`."""
    states: tuple[StateShape, ...] = ()
    """The states of its recurrent layers, in the order of the layers."""


def measure_layers(module: PreTrainedModel, device: torch.device, max_context_len: int) -> MeasuredLayers:
    """What each attention layer asks for, measured in a forward pass, since configurations differ between families.

    Raises `UnsupportedModel` for a model whose attention would be computed wrong.
    """
    has_state = getattr(module, "_is_stateful", False)  # as transformers marks such families
    if has_state and any(_has_convolution(part) and cache_name(part) is None for part in module.modules()):
        raise UnsupportedModel("its layers keep recurrent or convolutional state besides keys and values")
    adapt(module)
    probe, recurrent = AttentionProbe(max_context_len), bind_recurrent(module)
    counts_itself = needs_positions(module) and "position_ids" not in inspect.signature(module.forward).parameters
    if counts_itself and recurrent is None:
        raise UnsupportedModel(_COUNTS_ITSELF)
    AttentionInterface.register(PROBE_NAME, paged_attention_forward)
    AttentionMaskInterface.register(PROBE_NAME, _probed_mask)
    with _probing_masks(module, probe), _measuring(recurrent):
        run_probe(module, device, probe, _WIDTH)
    states = () if recurrent is None else tuple(shape for _, shape in sorted(recurrent.shapes.items()))
    if (positions := longest(module)) is not None:
        probe.bounds["its positions begin behind that of padding"] = positions
    if not probe.layers and not states:
        raise UnsupportedModel(
            "its attention is code of its own, which does not call the registered attention function"
        )
    if not probe.layers:  # recurrent layers alone, for which positions do not matter
        _check_every_layer(module, {shape.layer for shape in states})
        return MeasuredLayers((TOKENS_ALONE,), probe.bounds, states)
    if counts_itself:
        raise UnsupportedModel(_COUNTS_ITSELF)
    _number_attention(module, probe, {shape.layer for shape in states})
    return MeasuredLayers(tuple(probe.layers[layer] for layer in sorted(probe.layers)), probe.bounds, states)


def _check_every_layer(module: nn.Module, recurrent: set[int]) -> None:
    """Raise `UnsupportedModel` unless each decoder layer of a model without attention keeps a state in our slots."""
    lost = sorted(set(range(len(list(decoder_layers(module))))) - recurrent)
    if lost:
        raise UnsupportedModel(f"its layers {', '.join(map(str, lost))} neither attend nor keep a state that is ours")


def _has_convolution(part: nn.Module) -> bool:
    return any(isinstance(child, nn.Conv1d) for child in part.children())


@contextmanager
def _measuring(recurrent: RecurrentLayers | None) -> Iterator[None]:
    """Inside, the recurrent layers record the shapes of their states."""
    if recurrent is None:
        yield
        return
    recurrent.is_probed = True
    try:
        yield
    finally:
        recurrent.is_probed = False


def _number_attention(module: nn.Module, probe: AttentionProbe, recurrent: set[int]) -> None:
    """Number the layers that attend without gaps, as the pool stores them.

    Raises `UnsupportedModel` for a layer that does not attend and takes a cache in another way.
    """
    missing = sorted(set(range(max(probe.layers) + 1)) - set(probe.layers) - recurrent)
    kept = {id(layer) for layer in decoder_layers(module)}
    stateful = {int(part.layer_idx) for part in _layers(module) if id(part) not in kept and _takes_cache(part)}  # type: ignore[arg-type]
    lost = [layer for layer in missing if layer in stateful or not recurrent]
    if lost:
        raise UnsupportedModel(
            f"its layers {', '.join(map(str, lost))} have no attention, so their state would be lost between steps"
        )
    order = {layer: index for index, layer in enumerate(sorted(probe.layers))}
    for part in _layers(module):
        if part.layer_idx in order:
            part.kv_layer = order[part.layer_idx]  # type: ignore[assignment, index]


def _takes_cache(part: nn.Module) -> bool:
    return not inspect.signature(type(part).forward).parameters.keys().isdisjoint(CACHE_NAMES)


def run_probe(module: PreTrainedModel, device: torch.device, probe: AttentionProbe, width: int) -> None:
    """Run a forward pass over `width` tokens that records the arguments of attention instead of computing it."""
    paged = bind(module)
    paged.probe = probe
    try:
        with torch.inference_mode():
            module(
                input_ids=torch.zeros((1, width), dtype=torch.long, device=device),
                position_ids=torch.arange(width, device=device)[None],
                use_cache=False,
            )
    finally:
        paged.probe = None


@contextmanager
def _probing_masks(module: nn.Module, probe: AttentionProbe) -> Iterator[None]:
    """Inside, the masks that the model asks for are those of `probe`, and counted positions are noticed."""
    hooks = []
    token = _probing.set(probe)
    try:
        with attention_named(module, PROBE_NAME), _text_alone(probe.max_context_len), _Counter() as counter:
            probe.counter = counter
            hooks += [part.register_forward_pre_hook(counter.reset) for part in _layers(module)]
            yield
    finally:
        probe.counter = None
        _probing.reset(token)
        for hook in hooks:
            hook.remove()


@contextmanager
def _text_alone(length: int) -> Iterator[None]:
    """Inside, masks that show the parts of an image each other can be read up to this position, as of text."""

    def padded(ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return nn.functional.pad(ids, (0, max(0, length - ids.shape[-1])), value=-1)

    with patch.object(masking_utils, "maybe_pad_block_sequence_ids", padded):
        yield


def _layers(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if hasattr(part, "layer_idx")]


class _Counter(TorchFunctionMode):
    """Notes whether an attention module counts tokens before it attends."""

    def __init__(self) -> None:
        super().__init__()
        self.has_counted = False

    def reset(self, *_: Any) -> None:
        """A layer begins."""
        self.has_counted = False

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.arange:
            self.has_counted = True
        return function(*arguments, **(options or {}))


@contextmanager
def attention_named(module: nn.Module, name: str) -> Iterator[None]:
    """Inside, the parts of a model call the attention that `transformers` knows by this name."""
    configs = {
        id(config): config
        for part in module.modules()
        if isinstance(config := getattr(part, "config", None), PreTrainedConfig)
    }
    configs |= {
        id(inner): inner
        for config in list(configs.values())
        for key in config.sub_configs
        if isinstance(inner := getattr(config, key, None), PreTrainedConfig)
    }
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    for config in configs.values():
        config._attn_implementation_internal = name
    try:
        yield
    finally:
        for config, own in before:
            config._attn_implementation_internal = own


def read_mask(
    mask_function: MaskFunction, length: int, local_size: int | None, device: torch.device | str
) -> SeenPositions:
    """What a mask shows the queries of a sequence of `length` tokens. Raises `UnsupportedModel` for any other form."""
    zero = torch.zeros((), dtype=torch.long, device=device)
    keys = torch.arange(length, device=device)
    windows: set[int | None] = set()
    positions = sorted({0, length // 3, length // 2, (2 * length) // 3, length - 1})
    firsts = []
    for position in positions:
        seen = mask_function(zero, zero, torch.tensor(position, device=device), keys)
        visible = torch.as_tensor(seen, device=device).expand(length)
        first = int(visible.int().argmax()) if bool(visible.any()) else length
        if not torch.equal(visible, (keys >= first) & (keys <= position)):
            is_causal = not bool(visible[position + 1 :].any())
            raise UnsupportedModel(
                "its mask shows " + ("other positions than a window" if is_causal else "later tokens")
            )
        firsts.append(first)
        windows.add(position - first + 1 if first else None)
    if not any(firsts):
        return SeenPositions()
    if local_size and firsts == [position // local_size * local_size for position in positions]:
        return SeenPositions(chunk=local_size)
    sizes = windows - {None}
    window = next(iter(sizes))
    if len(sizes) > 1 or window is None or firsts != [max(0, position - window + 1) for position in positions]:
        raise UnsupportedModel("its mask shows other positions than a window")
    return SeenPositions(window)


def _is_read_elsewhere(name: str, value: Any) -> bool:
    """Whether an argument changes what attention computes. A bias of zeros, with or without the mask, does not."""
    if not isinstance(value, torch.Tensor) or name in _HARMLESS:
        return False
    return name != "position_bias" or not (_is_causal_mask(value) or not bool(value.any()))


def _is_causal_mask(mask: Any) -> bool:
    """Whether a mask `[…, tokens, tokens]` shows each token all tokens up to its own, and adds nothing."""
    if not isinstance(mask, torch.Tensor) or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    tokens = mask.shape[-1]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril().expand(mask.shape)
    if mask.dtype is torch.bool:
        return torch.equal(mask, causal)
    return bool((mask[causal] == 0).all()) and bool((mask[~causal] < _HIDDEN).all())
