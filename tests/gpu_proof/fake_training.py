"""A step of a training on the fake device: the trainings' own code, and the most memory that its tensors take.

A rank of several is one too: parameters are sharded by FSDP2, and collectives of a group that is not there do nothing.
Where a training asks which positions there are, the answer is all of them.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # collectives on fake tensors
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from deploy.simulation.device.fake_device import DEVICE, fake_device
from deploy.simulation.device.models import MODELS
from tests.support.engines.fake_device import moved
from workers.distill.descent import descend
from workers.distill.device_training import DeviceTraining
from workers.distill.dspark.memory import BlockBatch
from workers.distill.dspark.module import SparkModule
from workers.distill.dspark.rows import TextRows
from workers.distill.dspark.training import Anchors, BlockPlan, BlockTraining
from workers.distill.eagle3.head import Eagle3Head
from workers.distill.eagle3.memory import RollOutBatch, text_bytes
from workers.distill.eagle3.states import PackedTexts, TextBatch
from workers.distill.eagle3.training import RollOutPlan, RollOutTraining
from workers.distill.examples import Batch
from workers.distill.loop import TrainingPlan
from workers.distill.memory import TargetSize
from workers.distill.modules.batches import TapBatch
from workers.distill.modules.learner import ModuleLearner, ModulePlan, TappedModule
from workers.distill.modules.memory import ALTERNATIVES, ModuleBatch
from workers.distill.peers import ALONE, Peers
from workers.distill.student import Student, StudentPlan, make_student
from workers.distill.train import StudentLearner
from workers.model.draft_shapes import Shape
from workers.model.drafting.ends import TargetEnds
from workers.model.drafting.files import make_module
from workers.model.public_shapes import FeatureShape, MaskedBlockShape

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


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    q, k = q.to(v.dtype), k.to(v.dtype)  # by autocast
    if attn_mask is None:  # this kernel alone groups queries
        found: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)
        return found[0]
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
    attn_mask = attn_mask.expand(*q.shape[:3], k.shape[2])
    found = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal
    )
    return found[0]


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


class _EveryPosition(TorchFunctionMode):
    """Inside, every mask is true everywhere, every condition holds, a number is one, and nothing draws.

    Tensors on the device are such only if the host may wait for them; else what asks for their values raises.
    """

    def __init__(self, *, waits: bool) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        others = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
        first, name = (args or (None,))[0], getattr(function, "__name__", "")
        if not isinstance(first, Tensor) or not (self._waits or first.device.type == "cpu"):
            return function(*args, **others)
        if name in ("__bool__", "__float__", "item"):
            return {"__bool__": True}.get(name, 1.0)
        if name == "nonzero":
            places = torch.zeros((first.numel(), first.dim()), dtype=torch.int64, device=first.device)
            return places.unbind(dim=1) if others.get("as_tuple") else places
        if name == "__getitem__" and isinstance(mask := args[1], Tensor) and mask.dtype == torch.bool:
            places = torch.zeros(mask.numel(), dtype=torch.int64, device=mask.device)
            return first.flatten(0, mask.dim() - 1)[places]
        return function(*args, **others)


class _DropsCasts:
    """A training whose autocast drops the casts of parameters where it ends."""

    casts: _Casts

    def _autocast(self) -> Any:
        return _Autocast(super()._autocast(), self.casts)  # type: ignore[misc]


class _FakeBlockTraining(_DropsCasts, BlockTraining):
    pass


class _FakeRollOutTraining(_DropsCasts, RollOutTraining):
    pass


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
        model = _target(target, device)
        taps, hidden = shape.taps, shape.body.hidden_size
        with torch.device(device):
            module = SparkModule(shape, model.get_input_embeddings().weight, torch.empty(taps * hidden))
        parameters = sum(one.numel() for one in module.parameters())
        peers.shard(module, list(module.layers))
        texts = TextRows.empty((text_rows, batch.length), taps * hidden, target.vocabulary, device, torch.bfloat16)
        plan = BlockPlan(rows=batch.rows, blocks=batch.blocks, recomputes=recomputes, steps=2, report_steps=2)
        training = _FakeBlockTraining(model.get_output_embeddings().weight, module, plan, peers)
        training.casts = casts
        places = torch.zeros((batch.rows, batch.blocks), dtype=torch.int64, device=device)
        anchors = Anchors(places[:, 0].clone(), places, torch.ones_like(places, dtype=torch.bool))
        found = _two_steps(_stepping(training, texts, lambda: anchors), counter, counts_flops=ranks == 1)
        return FakeRun(parameters=parameters, **found)


def run_roll_out_training(
    target: TargetSize,
    shape: FeatureShape,
    batch: RollOutBatch,
    text_tokens: int,
    *,
    ranks: int = 1,
    recomputes: bool = False,
) -> FakeRun:
    """Two steps of an EAGLE-3 head's training on one rank, with so many tokens of texts."""
    casts, waits_not = _Casts(), _EveryPosition(waits=False)
    with _group(ranks) as peers, fake_device() as device, _gpu_kernels(casts), MemoryCounter() as counter, waits_not:
        model = _target(target, device)
        with torch.device(device):
            head = Eagle3Head(shape, batch.vocabulary)
            rows = torch.arange(batch.vocabulary)
            texts = torch.empty(text_tokens * text_bytes(shape), dtype=torch.uint8)
        parameters = sum(one.numel() for one in head.parameters())
        peers.shard(head)
        plan = RollOutPlan(
            depths=batch.depths, batch_tokens=batch.rows * batch.length, recomputes=recomputes, steps=2, report_steps=2
        )
        training = _FakeRollOutTraining(model, head, rows, plan, peers)
        training.casts = casts

        def drawn() -> TextBatch:
            size = (batch.rows, batch.length)
            lengths = torch.full((batch.rows,), batch.length)
            with torch.device(device):
                tokens = torch.zeros(size, dtype=torch.int64)
                taps, final = (
                    torch.empty((*size, count * shape.target_hidden_size), dtype=torch.bfloat16)
                    for count in (shape.taps, 1)
                )
            nothing = torch.zeros(size, dtype=torch.int64)
            packed = PackedTexts(nothing, nothing, nothing) if batch.packs else None
            return TextBatch(tokens, lengths, torch.zeros_like(lengths), taps, final, packed=packed)

        found = _two_steps(_stepping(training, texts, drawn), counter, counts_flops=ranks == 1)
        return FakeRun(parameters=parameters, **found)


def run_module_training(target: TargetSize, shape: Shape, batch: ModuleBatch) -> FakeRun:
    """Two steps of the training of a module, in one process."""
    casts, waits = _Casts(), _EveryPosition(waits=True)
    with fake_device() as device, _gpu_kernels(casts), MemoryCounter() as counter, waits:
        embedding, head = (
            torch.empty((rows, target.hidden_size), dtype=torch.bfloat16, device=device)
            for rows in (target.vocabulary, batch.vocabulary)
        )
        norm = torch.empty(target.hidden_size, dtype=torch.bfloat16, device=device)
        ends = TargetEnds(embedding, head, norm, 1e-5, torch.arange(batch.vocabulary)).to(device)
        with torch.device(device):
            module = make_module(ends, shape, tuple(range(batch.taps)))
        plan = ModulePlan(TrainingPlan(steps=2, batch_tokens=batch.rows * batch.length), paths=batch.paths)
        nothing_stored: Any = None  # batches are made here
        learner = ModuleLearner(TappedModule(module, ends, nothing_stored), (), plan)

        def drawn() -> TapBatch:
            size = (batch.rows, batch.length)
            with torch.device(device):
                tokens, lengths, first = (torch.zeros(one, dtype=torch.int64) for one in (size, batch.rows, batch.rows))
                taps = torch.empty((*size, batch.taps * target.hidden_size), dtype=torch.bfloat16)
                leading = torch.zeros((*size, ALTERNATIVES), dtype=torch.int64)
                return TapBatch(tokens, lengths, taps, first, leading, torch.zeros(leading.shape))

        def step() -> None:
            loss, _ = learner.loss_of(drawn(), 0)
            casts.clear()
            descend(loss, learner.parameters.values(), learner.optimizers, plan.training.gradient_norm)

        found = _two_steps(step, counter, counts_flops=True)
        return FakeRun(parameters=sum(one.numel() for one in module.parameters()), **found)


def run_student_training(name: str, layers: int, batch: ModuleBatch) -> FakeRun:
    """Two steps of the training of a model that starts as layers of one of `MODELS`, in one process."""
    casts, waits = _Casts(), _EveryPosition(waits=True)
    config = copy.deepcopy(MODELS[name])
    config.num_hidden_layers = layers
    plan = StudentPlan(tuple(range(layers)), vocabulary=tuple(range(batch.vocabulary)))
    # `transformers` makes no mask where it can read positions, which fake tensors do not have.
    reads = patch("transformers.masking_utils.is_tracing", lambda *_: False)
    with fake_device() as device, _gpu_kernels(casts), MemoryCounter() as counter, waits, reads:
        with torch.device(device), no_init_weights():
            target = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with patch.object(Student, "to", moved):
            student = make_student(target, plan, 0)
        del target
        training = TrainingPlan(steps=2, batch_tokens=batch.rows * batch.length)
        learner = StudentLearner(student, (), training, None)

        def drawn(*_: object) -> Batch:
            count = batch.rows * batch.length
            with torch.device(device):
                labels, leading = (torch.zeros(one, dtype=torch.int64) for one in (count, (count, ALTERNATIVES)))
                tokens = labels.view(batch.rows, batch.length)
                return Batch(tokens, torch.arange(count), labels.clone(), leading, torch.zeros(leading.shape))

        def step() -> None:
            loss, _ = learner.loss((), 0)
            casts.clear()
            descend(loss, learner.parameters.values(), learner.optimizers, training.gradient_norm)

        learner._batch = drawn  # type: ignore[method-assign, assignment]
        found = _two_steps(step, counter, counts_flops=True)
        return FakeRun(parameters=sum(one.numel() for one in learner.parameters.values()), **found)


def _stepping(training: DeviceTraining[Any, Any, Any], texts: Any, drawn: Callable[[], Any]) -> Callable[[], object]:
    """A step of a training on a batch that is drawn for it."""
    optimizers = training._optimizers()
    return lambda: training._step(texts, drawn(), optimizers)


def _two_steps(step: Callable[[], object], counter: MemoryCounter, *, counts_flops: bool) -> dict[str, int]:
    """What steps after the first one take, which have the optimizers' states; see `FakeRun`."""
    step()
    gc.collect()
    held = counter.peak = counter.bytes
    step()
    peak = counter.peak
    flops = 0
    if counts_flops:
        with FlopCounterMode(display=False) as counted:
            step()
        flops = counted.get_total_flops()
    return {"held": held, "peak": peak, "flops": flops}


class _Head(SimpleNamespace):
    """An output head, which multiplies with its `weight`."""

    def __call__(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.weight)


def _target(size: TargetSize, device: torch.device) -> Any:
    """What a training asks of a target: embedding and head."""
    embedding, head = (
        torch.empty((size.vocabulary, size.hidden_size), dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    return SimpleNamespace(
        get_input_embeddings=lambda: SimpleNamespace(weight=embedding),
        get_output_embeddings=lambda: _Head(weight=head),
    )


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
