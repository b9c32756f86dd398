"""FlashAttention-4 computes long chunks of prompts as the reference does, and no other row."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection
from cluster.core.errors import ConfigurationError
from cluster.core.ids import BlockId
from cluster.core.kv import KvLayout
from cluster.core.tree import EMPTY_TREE, TokenTree
from tests.support.engines.packed_reference import PackedReference
from tests.support.models import tiny
from workers.forward.backends import choice, flash
from workers.forward.backends.base import AttentionSetting, BackendPlugin, BackendUnavailable, StepKind, all_backends
from workers.forward.backends.choice import choose_backend, require_backend
from workers.forward.backends.flash import FlashBackend
from workers.forward.backends.sdpa import SdpaBackend
from workers.forward.backends.triton import TritonStep
from workers.forward.graph_sizes import MOST_TOKENS, GraphSize
from workers.forward.layout import RowShape
from workers.forward.runner import attention_setting
from workers.kv.groups import AttentionWindow, KvCacheGroups, LayerPlacement
from workers.kv.pool import KvPool
from workers.kv.spec import LayerShape
from workers.kv.store import KvStore
from workers.model.loading import load_model

WHEEL_PARAMETERS = (
    "q", "k", "v", "qv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "min_seqlen_k", "seqused_q",
    "seqused_k", "gather_kv_indices", "page_table", "softmax_scale", "causal", "window_size", "learnable_sink",
    "softcap", "num_splits", "pack_gqa", "deterministic", "score_mod", "score_mod_bwd", "mask_mod",
    "block_sparse_tensors", "aux_tensors", "aux_scalars", "return_lse", "scheduler_metadata", "seqlen_k_per_split",
    "disable_scheduler_metadata", "gather_bwd_recompute_p", "gather_bwd_token_chunk",
)  # fmt: skip
"""The parameters of `flash_attn.cute.flash_attn_varlen_func` in flash-attn-4 4.0.0b36, as its source text has them."""
WINDOWS = (AttentionWindow(), AttentionWindow(19), AttentionWindow(600))
TREE = TokenTree((1, 2, 3, 4, 5, 6), (-1, -1, 0, 0, 3, 4))
MIXED = (
    (37, 1, TREE),
    (40, MOST_TOKENS + 1, EMPTY_TREE),
    (16, 1, EMPTY_TREE),
    (5, 3, TokenTree.chain(range(4))),
    (0, 600, EMPTY_TREE),
    (3, 66, EMPTY_TREE),
)
"""Rows (stored, fresh, tree): the second and the fifth are long chunks."""
CHUNKS = [MOST_TOKENS + 1, 600]
"""Tokens of the long chunks."""
CLOSE = 1e-5
NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@dataclass
class Wheel:
    """Attention over blocks in plain torch, with the parameters of the library's function that the backend passes."""

    calls: list[int] = field(default_factory=list)
    """Queries of each call."""
    short: int = 0
    """A planted fault: positions that are forgotten."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        seqused_k: torch.Tensor,
        page_table: torch.Tensor,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int | None, int | None],
        learnable_sink: torch.Tensor | None,
        softcap: float,
        num_splits: int,
    ) -> tuple[torch.Tensor, None]:
        self.calls.append(q.shape[1])
        assert len(q) == len(seqused_k) == len(page_table) == num_splits == 1 and causal and window_size[1] is None
        assert seqused_k.dtype == page_table.dtype == torch.int32
        count, queries = int(seqused_k[0]) - self.short, q[0]
        assert page_table.shape[1] == -(-int(seqused_k[0]) // k.shape[1])
        keys, values = (one[page_table[0].long()].flatten(0, 1)[:count] for one in (k, v))
        grouped = queries.unflatten(1, (keys.shape[1], -1))
        scale = queries.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        products = torch.einsum("qhgd,khd->hgqk", grouped.float(), keys.float()) * scale
        if softcap:
            products = softcap * torch.tanh(products / softcap)
        position = torch.arange(len(queries))[:, None] + count - len(queries)
        sees = torch.arange(count) <= position
        if window_size[0] is not None:
            sees &= torch.arange(count) >= position - window_size[0]
        products = products.masked_fill(~sees, -torch.inf)
        if learnable_sink is not None:
            column = learnable_sink.float().view(*products.shape[:2], 1, 1).expand(*products.shape[:3], 1)
            products = torch.cat((products, column), -1)
        weights = products.softmax(-1)[..., :count]
        attended = torch.einsum("hgqk,khd->qhgd", weights, values.float()).flatten(1, 2)
        return attended.to(q.dtype)[None], None


class OtherRows(PackedReference):
    """What the Triton kernels compute, without them. It does not compute learned sinks."""

    def attend_with_sinks(
        self, layer: int, queries: torch.Tensor, metadata: TritonStep, scaling: float | None, sinks: torch.Tensor
    ) -> torch.Tensor:
        return torch.full_like(queries, torch.nan)


class OnCpu(FlashBackend, OtherRows):
    """The backend, whose rows that are no long chunks are computed without Triton."""


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> Wheel:
    planted = Wheel()
    module = SimpleNamespace(flash_attn_varlen_func=planted)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=module))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    return planted


def rows_of(shapes: Sequence[tuple[int, int, TokenTree]], size: int) -> list[RowShape]:
    """Rows whose blocks lie anywhere in the pool."""
    needed = [-(-(stored + fresh + len(tree)) // size) for stored, fresh, tree in shapes]
    order = iter(torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).tolist())
    return [
        RowShape([[BlockId(next(order)) for _ in range(count)]], *shape)
        for shape, count in zip(shapes, needed, strict=True)
    ]


def setting_of(
    layer: LayerShape, size: int, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> AttentionSetting:
    """A layer with each window over one pool of random numbers."""
    placements = tuple(LayerPlacement(0, 0, window) for window in WINDOWS)
    blocks = sum(2 + (stored + fresh) // size for stored, fresh, _ in MIXED)
    generator = torch.Generator().manual_seed(0)
    numbers = blocks + 1, size, layer.kv_heads, layer.head_dim
    keys, values = (torch.randn(numbers, generator=generator).to(device, dtype) for _ in range(2))
    store = KvStore(KvCacheGroups(KvLayout(size), placements, (layer,)), [keys], [values])
    return AttentionSetting(store, (layer,) * len(WINDOWS), blocks, dtype, torch.device(device))


def queries_of(rows: Sequence[RowShape], layer: LayerShape) -> torch.Tensor:
    shape = sum(row.width for row in rows), layer.kv_heads * layer.heads_per_kv, layer.head_dim
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("layer", "size"),
    [(LayerShape(2, 16, heads_per_kv=2), 16), (LayerShape(1, 32), 64), (LayerShape(1, 16, heads_per_kv=5), 32)],
)
def test_mixed_rows_equal_the_reference_under_each_window(layer: LayerShape, size: int, wheel: Wheel) -> None:
    """Prompt chunks, single tokens, chains and trees. What neither of both kernels computes is NaN."""
    setting, rows = setting_of(layer, size), rows_of(MIXED, size)
    queries, backend, reference = queries_of(rows, layer), OnCpu(setting), SdpaBackend(setting)
    expected, plan = reference.plan(rows), backend.plan(rows)
    for index, scaling in enumerate((None, 0.3, None)):
        right = reference.attend(index, queries, expected, scaling)
        torch.testing.assert_close(backend.attend(index, queries, plan, scaling), right, atol=CLOSE, rtol=CLOSE)
    assert wheel.calls == CHUNKS * len(WINDOWS)


def test_soft_caps_and_learned_sinks_equal_the_reference(wheel: Wheel) -> None:
    layer = LayerShape(1, 16, heads_per_kv=4, soft_cap=2.0)
    setting, rows = setting_of(layer, 16), rows_of([MIXED[1], MIXED[4]], 16)
    queries, backend, reference = 3 * queries_of(rows, layer), OnCpu(setting), SdpaBackend(setting)
    expected, plan, sinks = reference.plan(rows), backend.plan(rows), torch.linspace(-4, 6, 4)
    for index in range(len(WINDOWS)):
        capped = backend.attend(index, queries, plan, None)
        torch.testing.assert_close(capped, reference.attend(index, queries, expected, None), atol=CLOSE, rtol=CLOSE)
        sunk = backend.attend_with_sinks(index, queries, plan, None, sinks)
        right = reference.attend_with_sinks(index, queries, expected, None, sinks)
        torch.testing.assert_close(sunk, right, atol=CLOSE, rtol=CLOSE)
        assert (sunk - capped).abs().max() > 0.05, "the sinks took a share"
    assert wheel.calls == CHUNKS * 2 * len(WINDOWS)


@pytest.mark.usefixtures("wheel")
def test_a_row_is_computed_alike_beside_others_and_in_graphs() -> None:
    """The kernel of a row depends on the row alone: Triton computes rows of graphs and rows with drafts."""
    setting = setting_of(LayerShape(1, 16), 16)
    backend, rows = OnCpu(setting), rows_of(MIXED, 16)
    step, first = backend.plan(rows), sum(row.width for row in rows[:4])
    (alone,) = backend.plan(rows[4:5]).chunks
    assert [chunk.tokens for chunk in step.chunks] == [slice(7, 7 + MOST_TOKENS + 1), slice(first, first + 600)]
    for key, (blocks, positions) in alone.blocks.items():
        beside = step.chunks[1].blocks[key]
        assert blocks.tolist() == beside[0].tolist() and positions.tolist() == beside[1].tolist() == [600]
    drafted = rows_of([(0, MOST_TOKENS + 1, TREE), (3, MOST_TOKENS, EMPTY_TREE)], 16)
    assert not backend.plan(drafted).chunks
    size = GraphSize(2, MOST_TOKENS, MOST_TOKENS, 40, 8)
    packed, padding = (backend.plan_packed(rows, size).arrays for rows in (drafted[1:], ()))
    for part, whole in zip(packed, padding, strict=True):
        assert all(length <= most for length, most in zip(part.shape, whole.shape, strict=True))


class TestChoice:
    @pytest.fixture
    def suited(self, tmp_path: Path) -> AttentionSetting:
        return setting_for(tmp_path, "cpu", "float32")

    @pytest.fixture
    def plugin(self) -> BackendPlugin:
        """The backend as on a GPU with Triton, in float32."""
        found = next(one for one in all_backends() if one.name == "flash")
        return replace(found, open=OnCpu, capabilities=replace(found.capabilities, devices=None, kv_types=None))

    def test_it_is_used_only_where_it_is_named(
        self, suited: AttentionSetting, plugin: BackendPlugin, wheel: Wheel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        others = [one for one in all_backends() if one.name != "flash"]
        monkeypatch.setattr(choice, "all_backends", lambda: [*others, plugin])
        assert choose_backend(suited, StepKind.RAGGED).name != "flash"
        assert not wheel.calls
        chosen = require_backend("flash", suited)
        assert isinstance(chosen.backend, FlashBackend)
        assert set(wheel.calls) == {MOST_TOKENS + 1}, "the trial has a long chunk"

    def test_the_trial_finds_a_fault_of_long_chunks(
        self, suited: AttentionSetting, plugin: BackendPlugin, wheel: Wheel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reference = next(one for one in all_backends() if one.name == "sdpa")
        monkeypatch.setattr(choice, "all_backends", lambda: [reference, plugin])
        wheel.short = 1
        refusal = "'flash' is refused, because its output differs from the reference.*; auto takes 'sdpa'"
        with pytest.raises(ConfigurationError, match=refusal):
            require_backend("flash", suited)
        assert wheel.calls

    def test_it_is_refused_on_a_cpu(self, suited: AttentionSetting) -> None:
        refusal = "'flash' is refused, because it does not run on cpu; auto takes '(native|sdpa)'"
        with pytest.raises(ConfigurationError, match=refusal):
            require_backend("flash", suited)

    def test_it_is_refused_without_its_package(self, suited: AttentionSetting, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("flash_attn", "flash_attn.cute"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(BackendUnavailable, match=r"flash-attn-4 is not installed .*'pilotfish\[flash\]'"):
            OnCpu(suited)

    def test_it_is_refused_on_older_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
        with pytest.raises(BackendUnavailable, match=r"it does not run on compute capability 8\.0, only on 9, 10, 11"):
            flash._library(torch.device("cuda"))

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({}, None),
            ({"dtype": torch.float32}, "it does not read keys and values of torch.float32"),
            ({"layers": (LayerShape(2, 72),)}, "it does not support heads of 72 numbers"),
            ({"layers": (LayerShape(1, 576, latent_dim=512),)}, "it does not compute latents"),
            ({"layers": (LayerShape(1, 64, alibi_slopes=(0.5,)),)}, "it does not compute ALiBi"),
        ],
    )
    def test_what_it_does_not_compute_is_refused_by_name(self, changes: dict[str, Any], problem: str | None) -> None:
        on_gpu = replace(setting_of(LayerShape(2, 64), 16, dtype=torch.bfloat16), device=torch.device("cuda"))
        assert flash.CAPABILITIES.problem(replace(on_gpu, **changes), StepKind.RAGGED) == problem

    def test_windows_with_sinks_and_8_bits_are_refused(self) -> None:
        on_gpu = replace(setting_of(LayerShape(2, 64), 16, dtype=torch.bfloat16), device=torch.device("cuda"))
        placements = (LayerPlacement(0, 0, AttentionWindow(64, sinks=4)),)
        with_sinks = replace(on_gpu.store.kv_groups, placements=placements)
        for store, problem in (
            (replace(on_gpu.store, stored=torch.int8), "it does not read keys and values stored as torch.int8"),
            (replace(on_gpu.store, kv_groups=with_sinks), "it does not compute sinks"),
        ):
            assert flash.CAPABILITIES.problem(replace(on_gpu, store=store), StepKind.RAGGED) == problem


def setting_for(directory: Path, device: str, dtype: str, block_size: int = 16) -> AttentionSetting:
    path = tiny.save(directory, tiny.llama(head_dim=64))
    model = load_model(ModelSection(path=str(path), device=device, dtype=dtype, native="off"))
    return attention_setting(model, KvPool(model.kv_spec, KvSection(block_size=block_size), blocks=50))


def test_the_planted_function_has_parameters_of_the_library() -> None:
    assert inspect.signature(Wheel()).parameters.keys() <= set(WHEEL_PARAMETERS)


@pytest.mark.cuda
@NEEDS_A_GPU
class TestOnAGpu:
    def test_the_library_has_the_parameters(self) -> None:
        library = pytest.importorskip("flash_attn.cute")
        found = inspect.signature(library.flash_attn_varlen_func).parameters.keys()
        assert inspect.signature(Wheel()).parameters.keys() <= found

    @pytest.mark.parametrize("block_size", [16, 128])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_it_passes_its_trial(self, tmp_path: Path, dtype: str, block_size: int) -> None:
        pytest.importorskip("flash_attn.cute")
        assert require_backend("flash", setting_for(tmp_path, "cuda", dtype, block_size)).name == "flash"

    @pytest.mark.parametrize("layer", [
        LayerShape(2, 64, heads_per_kv=4), LayerShape(2, 128, heads_per_kv=4), LayerShape(4, 80), LayerShape(2, 96),
        LayerShape(1, 256, heads_per_kv=2), LayerShape(2, 64, heads_per_kv=8, soft_cap=2.0),
    ])  # fmt: skip
    @pytest.mark.parametrize("size", [16, 128])
    def test_mixed_rows_are_close_to_the_reference(self, layer: LayerShape, size: int) -> None:
        pytest.importorskip("flash_attn.cute")
        setting, rows = setting_of(layer, size, "cuda", torch.bfloat16), rows_of(MIXED, size)
        queries = queries_of(rows, layer).to("cuda", torch.bfloat16)
        backend, reference = FlashBackend(setting), SdpaBackend(setting)
        plan, expected = backend.plan(rows), reference.plan(rows)
        alone = backend.plan(rows[1:2])
        own = plan.chunks[0].tokens
        sinks = torch.linspace(-4, 6, queries.shape[1], device="cuda")
        for index in range(len(WINDOWS)):
            found = backend.attend(index, queries, plan, None)
            torch.testing.assert_close(found, reference.attend(index, queries, expected, None), atol=2e-2, rtol=2e-2)
            assert torch.equal(backend.attend(index, queries[own], alone, None), found[own]), "neighbours change no bit"
            sunk = backend.attend_with_sinks(index, queries, plan, None, sinks)
            right = reference.attend_with_sinks(index, queries, expected, None, sinks)
            torch.testing.assert_close(sunk, right, atol=2e-2, rtol=2e-2)
