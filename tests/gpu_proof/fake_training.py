"""A step of a training on the fake device: the trainings' own code, and the most memory that its tensors take.

A rank of several is one too: parameters are sharded by FSDP2, and collectives of a group that is not there do nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives on fake tensors
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from deploy.simulation.device.fake_device import DEVICE, fake_device
from deploy.simulation.device.models import MODELS
from workers.distill.device_training import DeviceTraining
from workers.distill.dspark.module import SparkModule
from workers.distill.dspark.rows import TextRows
from workers.distill.dspark.training import Anchors, BlockPlan, BlockTraining
from workers.distill.memory import BlockBatch, TargetSize
from workers.distill.peers import ALONE, Peers
from workers.model.public_shapes import MaskedBlockShape

_BACKEND = "pilotfish_nobody"
"""The backend of `torch.distributed` whose collectives do nothing."""
_CAST = ("linear", "matmul", "mm", "addmm", "bmm")
"""Operations whose operands autocast casts."""


class MemoryCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors on the fake device that are made inside and still in use."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        """The most bytes in use so far."""
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()

    @property
    def bytes(self) -> int:
        """Bytes in use. Storages are asked each time: FSDP2 makes them empty to free them."""
        return sum(storage.nbytes() for storage in self._storages)

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its part of this rank comes here next
        output = function(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.device.type == DEVICE]
        if made:
            self._storages.update(leaf.untyped_storage() for leaf in made)
            self.peak = max(self.peak, self.bytes)
        return output


def _attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **settings: Any) -> Tensor:
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    found: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, torch.is_grad_enabled(), 0.0, bool(settings.get("is_causal", False))
    )[0]
    return found


class _Normalize(torch.autograd.Function):
    """A norm in one kernel, which keeps its input and a number of each row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, hidden[..., :1].clone())
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, _ = ctx.saved_tensors
        return torch.empty_like(hidden), torch.empty_like(weight)


def _normalize(hidden: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
    found: Tensor = _Normalize.apply(hidden, weight)  # type: ignore[no-untyped-call]
    return found


def _softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """A kernel reads bfloat16 and writes float32."""
    found: Tensor = torch.ops.aten._softmax(scores, dim, dtype == torch.float32 and scores.dtype == torch.bfloat16)
    return found


_KERNELS: dict[str, Callable[..., Tensor]] = {
    "scaled_dot_product_attention": _attend,
    "rms_norm": _normalize,
    "softmax.int": _softmax,
}
"""Operations that a GPU computes in one kernel, and keeps neither scores nor copies of."""


class _Casts:
    """What autocast does on a GPU: it casts the operands of products, and keeps casts of parameters until it ends."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # the parameter and its cast, by the parameter's identity

    def cast(self, tensor: Tensor) -> Tensor:
        """A floating-point tensor in the type of the products."""
        dtype = torch.get_autocast_dtype(DEVICE)
        if tensor.dtype == dtype or not tensor.is_floating_point():
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad) or _is_in_backward():
            return tensor.to(dtype)
        if id(tensor) not in self._kept:
            self._kept[id(tensor)] = tensor, tensor.to(dtype)
        return self._kept[id(tensor)][1]

    def clear(self) -> None:
        """Drop all casts."""
        self._kept.clear()


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@contextmanager
def _gpu_kernels(casts: _Casts) -> Iterator[None]:
    """Inside, the fake device has autocast, and the kernels of a GPU whose memory differs from what they replace."""
    getattr(torch, DEVICE).get_amp_supported_dtype = lambda: [torch.bfloat16]
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with ExitStack() as stack:
        rest = stack.enter_context(torch.library._scoped_library("_", "IMPL"))
        rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        aten = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for name in _CAST:

            def product(operation: Any, *operands: Any) -> Any:
                with torch._C._ExcludeDispatchKeyGuard(key):
                    return operation(*(casts.cast(one) if isinstance(one, Tensor) else one for one in operands))

            aten.impl(name, partial(product, getattr(torch.ops.aten, name)), "AutocastPrivateUse1")
        for name, kernel in _KERNELS.items():
            for dispatched in ("PrivateUse1", "AutogradPrivateUse1"):
                aten.impl(name, kernel, dispatched)
        # Threads of devices exist since the first backward pass of a process, which may be older than this device.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        yield


class _Autocast:
    """`torch.autocast`, whose end drops the casts of parameters."""

    def __init__(self, inner: torch.autocast, casts: _Casts) -> None:
        self._inner, self._casts = inner, casts

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._casts.clear()
        self._inner.__exit__(*error)


class _FakeBlockTraining(BlockTraining):
    casts: _Casts

    def _autocast(self) -> Any:
        return _Autocast(super()._autocast(), self.casts)


@dataclass(frozen=True, slots=True)
class FakeRun:
    """What the training on the fake device took, in bytes of one rank."""

    held: int
    """Between steps."""
    peak: int
    """The most of a step."""
    parameters: int
    """Parameters of the module, on all ranks together."""
    flops: int
    """Operations of a step, counted on one rank alone; else 0."""


@lru_cache
def target_size(name: str) -> TargetSize:
    """The sizes of a model of `MODELS`."""
    config: Any = MODELS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return TargetSize(sum(one.numel() for one in model.parameters()), config.hidden_size, config.vocab_size)


def run_block_training(
    target: TargetSize,
    shape: MaskedBlockShape,
    batch: BlockBatch,
    text_rows: int,
    *,
    ranks: int = 1,
    recomputes: bool = False,
) -> FakeRun:
    """Two steps of a DSpark drafter's training on one rank, with so many rows of texts."""
    casts = _Casts()
    with _group(ranks) as peers, fake_device() as device, _gpu_kernels(casts), MemoryCounter() as counter:
        rest, model = _target(target, ranks, device)
        taps, hidden = shape.taps, shape.body.hidden_size
        with torch.device(device):
            module = SparkModule(shape, model.get_input_embeddings().weight, torch.empty(taps * hidden))
        parameters = sum(one.numel() for one in module.parameters())
        peers.shard(module, list(module.layers))
        texts = TextRows.empty((text_rows, batch.length), taps * hidden, target.vocabulary, device, torch.bfloat16)
        plan = BlockPlan(rows=batch.rows, blocks=batch.blocks, recomputes=recomputes, steps=2, report_steps=2)
        training = _FakeBlockTraining(model, module, plan, peers)
        training.casts = casts
        places = torch.zeros((batch.rows, batch.blocks), dtype=torch.int64, device=device)
        anchors = Anchors(places[:, 0].clone(), places, torch.ones_like(places, dtype=torch.bool))
        found = _two_steps(training, texts, anchors, counter)
        del rest
        return FakeRun(parameters=parameters, **found)


def _two_steps(
    training: DeviceTraining[Any, Any, Any], texts: Any, batch: Any, counter: MemoryCounter
) -> dict[str, int]:
    """What steps after the first one take, which have the optimizers' states; see `FakeRun`."""
    optimizers = training._optimizers()
    training._step(texts, batch, optimizers)
    gc.collect()
    held = counter.peak = counter.bytes
    training._step(texts, batch, optimizers)
    peak = counter.peak
    flops = 0
    if training._peers.count == 1:
        with FlopCounterMode(display=False) as counted:
            training._step(texts, batch, optimizers)
        flops = counted.get_total_flops()
    return {"held": held, "peak": peak, "flops": flops}


def _target(size: TargetSize, ranks: int, device: torch.device) -> tuple[Tensor, Any]:
    """The memory of a rank's part of a target, and what a training asks of it: embedding and head."""
    embedding, head = (
        torch.empty((size.vocabulary, size.hidden_size), dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    rest = torch.empty(size.share(ranks) - 2 * 2 * embedding.numel(), dtype=torch.uint8, device=device)
    found = SimpleNamespace(
        get_input_embeddings=lambda: SimpleNamespace(weight=embedding),
        get_output_embeddings=lambda: SimpleNamespace(weight=head),
    )
    return rest, found


@contextmanager
def _group(ranks: int) -> Iterator[Peers]:
    """Inside, this process is rank 0 of a group whose other ranks nobody runs."""
    if ranks == 1:
        yield ALONE
        return
    with fake_device():
        pass  # it registers the device
    module = getattr(torch, DEVICE)
    for name in ("Stream", "Event", "current_stream", "stream", "synchronize"):
        setattr(module, name, getattr(torch.cpu, name))
    module.set_device = module.set_stream = lambda *_: None
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, _no_group, extended_api=True, devices=[DEVICE, "cpu"])
    dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=0, world_size=ranks)
    try:
        yield Peers.of(dist.group.WORLD, DEVICE)
    finally:
        dist.destroy_process_group()


def _no_group(options: Any, backend_options: Any) -> FakeProcessGroup:
    return FakeProcessGroup._create_internal(options.group_rank, options.group_size, backend_options)
