"""An attention backend is used only if it supports the model and computes the same as the reference."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from cluster.core.config.model_section import ModelSection
from cluster.core.config.target_section import KvSection, TargetSection
from cluster.core.errors import ConfigurationError
from tests.support.models import tiny
from workers.forward.backends import choice, flash, triton
from workers.forward.backends.base import (
    REFERENCE,
    AttentionSetting,
    BackendPlugin,
    BackendUnavailable,
    Capabilities,
    Feature,
    StepKind,
    all_backends,
)
from workers.forward.backends.choice import choose_backend, require_backend
from workers.forward.backends.flex import Flex, FlexBackend
from workers.forward.backends.native import NativeBackend
from workers.forward.backends.sdpa import SdpaBackend
from workers.forward.gathered_step import GatheredStep
from workers.forward.graph_sizes import WORD
from workers.forward.layout import RowShape
from workers.forward.runner import attention_setting, choose_attention
from workers.kv.pool import KvPool
from workers.kv.spec import LayerShape
from workers.model.loading import load_model
from workers.serve.configuration import load_configuration
from workers.verify.build import build_engine


@pytest.fixture
def unfused(monkeypatch: pytest.MonkeyPatch) -> Flex:
    """The kernel as `torch` defines it, over the whole pool."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    return flex_attention


def setting_for(directory: Path, device: str = "cpu", block_size: int = 16, dtype: str = "float32") -> AttentionSetting:
    model = load_model(ModelSection(path=str(directory), device=device, dtype=dtype, native="off"))
    return attention_setting(model, KvPool(model.kv_spec, KvSection(block_size=block_size), blocks=50))


@pytest.fixture(scope="module")
def suited(tmp_path_factory: pytest.TempPathFactory) -> AttentionSetting:
    return setting_for(tiny.save(tmp_path_factory.mktemp("suited"), tiny.llama(head_dim=16)))


def candidates(flex: Flex) -> list[BackendPlugin]:
    """All backends, with `flex` in place of the compiled kernel."""
    return [
        replace(one, open=lambda setting: FlexBackend(setting, flex)) if one.name == "flex" else one
        for one in all_backends()
    ]


def reference() -> BackendPlugin:
    return next(one for one in all_backends() if one.name == REFERENCE)


def test_every_model_has_a_backend_for_both_kinds_of_steps() -> None:
    assert {"sdpa", "flex", "native"} <= {one.name for one in all_backends()}
    assert reference().capabilities.steps == frozenset(StepKind)


def test_a_backend_that_computes_the_same_as_the_reference_is_used_and_named(
    suited: AttentionSetting, unfused: Flex, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        chosen = choose_backend(suited, StepKind.PADDED, candidates=candidates(unfused))
    assert isinstance(chosen.backend, FlexBackend)
    assert chosen.capabilities.skips_unused_blocks
    assert "attention in CUDA graphs is computed by the backend flex" in caplog.text


def test_a_rank_tells_the_others_that_a_backend_does_not_suit_it(
    suited: AttentionSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may have more query heads of a KV head than the others, and refuse a backend that they accept."""
    told: list[int] = []
    monkeypatch.setattr(choice, "least_of_all_ranks", lambda number, _: told.append(number) or number)
    narrow = replace(reference().capabilities, most_heads_per_kv=1)
    plugins = [replace(reference(), name="narrow", capabilities=narrow), reference()]
    assert choose_backend(suited, StepKind.RAGGED, 2, plugins).name == REFERENCE
    assert told == [0]


def test_a_backend_that_computes_something_else_is_not_used(
    suited: AttentionSetting, unfused: Flex, caplog: pytest.LogCaptureFixture
) -> None:
    def one_slot_short(*stored: torch.Tensor, block_mask: BlockMask, **options: object) -> torch.Tensor:
        used = int(block_mask.kv_indices[0, 0, 0, 0])  # the first block of the first row

        def mask(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
            return block_mask.mask_mod(row, head, query, slot) & (slot != used * 16 + 3)

        short = BlockMask.from_kv_blocks(
            block_mask.kv_num_blocks,
            block_mask.kv_indices,
            BLOCK_SIZE=block_mask.BLOCK_SIZE,
            mask_mod=mask,
            seq_lengths=block_mask.seq_lengths,
            compute_q_blocks=False,
        )
        return unfused(*stored, block_mask=short, **options)

    chosen = choose_backend(suited, StepKind.PADDED, candidates=candidates(one_slot_short))
    assert isinstance(chosen.backend, SdpaBackend)
    assert "differs from the reference" in caplog.text


def test_a_backend_that_cannot_be_built_is_not_used(suited: AttentionSetting, caplog: pytest.LogCaptureFixture) -> None:
    def unbuilt(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no compiler")

    chosen = choose_backend(suited, StepKind.PADDED, candidates=candidates(unbuilt))
    assert isinstance(chosen.backend, SdpaBackend)
    assert "no compiler" in caplog.text


class Planted(SdpaBackend):
    """Computes as the reference does, but for one planted fault."""


class StoresTwice(Planted):
    """Stores a token's key and value in a second slot, too."""

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, metadata: GatheredStep) -> None:
        super().write(layer, keys, values, metadata)
        self._store.of(layer)[0].view(-1, *keys.shape[1:])[-1 - 2 * self._store.of(layer)[0].shape[1]] = keys[0]


class ForgetsTheTree(Planted):
    """Takes the nodes of a tree for a chain."""

    def plan(self, rows: Sequence[RowShape]) -> GatheredStep:
        return super().plan([replace(row, tree=type(row.tree).chain(row.tree.tokens)) for row in rows])


class ForgetsTheScale(Planted):
    """Does not scale the products of queries and keys."""

    def attend(self, layer: int, queries: torch.Tensor, metadata: GatheredStep, scaling: float | None) -> torch.Tensor:
        return super().attend(layer, queries, metadata, 1.0)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("faulty", [StoresTwice, ForgetsTheTree, ForgetsTheScale])
def test_the_trial_finds_faults_of_what_is_stored_and_what_is_seen(
    faulty: Callable[[AttentionSetting], SdpaBackend], block_size: int, tmp_path: Path
) -> None:
    setting = setting_for(tiny.save(tmp_path, tiny.llama()), block_size=block_size)
    everything = Capabilities(frozenset(StepKind), frozenset(Feature))
    for create, is_right in ((Planted, True), (faulty, False)):
        plugin = BackendPlugin("planted", everything, 30, create)
        chosen = choose_backend(setting, StepKind.RAGGED, candidates=[plugin, reference()])
        assert (chosen.name == "planted") is is_right


class ForgetsAPrompt(Planted):
    """Computes prompt chunks that are not long, which have kernels of their own, without their last token's value."""

    def attend(self, layer: int, queries: torch.Tensor, metadata: GatheredStep, scaling: float | None) -> torch.Tensor:
        found = super().attend(layer, queries, metadata, scaling)
        for group in metadata.groups:
            if WORD < group.padding.gather.shape[1] < flash.CAPABILITIES.prompts[-1]:
                found[group.targets[-1:]] = 0
        return found


@pytest.mark.parametrize("capabilities", [triton.CAPABILITIES, flash.CAPABILITIES], ids=["triton", "flash"])
def test_the_trial_finds_faults_of_the_kernels_for_prompt_chunks(
    capabilities: Capabilities, suited: AttentionSetting
) -> None:
    on_any_device = replace(capabilities, devices=None, kv_types=None)
    for create, chosen in ((Planted, "planted"), (ForgetsAPrompt, REFERENCE)):
        plugin = BackendPlugin("planted", on_any_device, 30, create)
        assert choose_backend(suited, StepKind.RAGGED, candidates=[plugin, reference()]).name == chosen


def test_a_backend_that_is_not_available_here_is_passed_over(suited: AttentionSetting) -> None:
    def missing(_: AttentionSetting) -> SdpaBackend:
        raise BackendUnavailable("its library is missing")

    plugin = BackendPlugin("missing", Capabilities(frozenset(StepKind), frozenset(Feature)), 30, missing)
    assert choose_backend(suited, StepKind.RAGGED, candidates=[plugin, reference()]).name == "sdpa"


def test_a_named_backend_is_used_whatever_its_preference(suited: AttentionSetting) -> None:
    assert require_backend(REFERENCE, suited).name == REFERENCE


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("flsh", f"it must be one of auto, {', '.join(one.name for one in all_backends())}"),
        ("flex", "it does not compute steps of any size; auto takes '(native|sdpa)'"),
        ("triton", "it does not run on cpu; auto takes '(native|sdpa)'"),
    ],
)
def test_a_named_backend_that_cannot_be_used_is_refused(suited: AttentionSetting, name: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"target.attention_backend: '{name}' is refused.*{problem}"):
        require_backend(name, suited)


def test_the_setting_describes_the_backends_that_only_it_chooses() -> None:
    described = TargetSection.model_fields["attention_backend"].description or ""
    assert [one.name for one in all_backends() if one.preference < 0 and f"`{one.name}`" not in described] == []


def test_a_named_backend_is_refused_where_the_kernels_compute_the_model(tmp_path: Path) -> None:
    model = load_model(ModelSection(path=str(tiny.save(tmp_path, tiny.llama())), device="cpu"))
    if model.native is None:
        pytest.skip("needs a C compiler")
    pool = KvPool(model.kv_spec, KvSection(), blocks=4)
    assert choose_attention(model, pool) is None
    with pytest.raises(ConfigurationError, match="'sdpa' is refused, because the CPU kernels compute the whole model"):
        choose_attention(model, pool, "sdpa")


def test_a_target_takes_the_backend_that_its_setting_names(tmp_path: Path) -> None:
    directory = str(tiny.save(tmp_path, tiny.llama()))
    target = {"path": directory, "device": "cpu", "native": "off", "attention_backend": "flash", "trial": "off"}
    with pytest.raises(ConfigurationError, match="attention_backend: 'flash' is refused"):
        build_engine(load_configuration({"target": target}).target)


@pytest.mark.parametrize(
    ("changes", "block_size", "problem"),
    [
        ({}, 8, "blocks of 8 tokens"),
        ({}, 24, "blocks of 24 tokens"),
        ({"layers": (LayerShape(2, 8),)}, 16, "heads of 8 numbers"),
        ({"layers": (LayerShape(2, 64, heads_per_kv=2, alibi_slopes=(0.5, 0.25, 0.1, 0.05)),)}, 16, "ALiBi"),
        ({"blocks": 1 << 20}, 16, "more than its"),
        ({"relative_biases": (lambda relative: relative,)}, 16, "relative bias"),
    ],
)
def test_what_flex_attention_does_not_support_is_left_to_the_reference(
    changes: dict[str, object], block_size: int, problem: str, tmp_path: Path
) -> None:
    setting = replace(setting_for(tiny.save(tmp_path, tiny.llama(head_dim=64)), block_size=block_size), **changes)
    flex = next(one for one in all_backends() if one.name == "flex")
    assert problem in (flex.capabilities.problem(setting, StepKind.PADDED) or "")


def test_a_backend_refuses_steps_that_it_does_not_plan(suited: AttentionSetting, unfused: Flex) -> None:
    with pytest.raises(ValueError, match="FlexBackend does not compute steps of any size"):
        FlexBackend(suited, unfused).plan(())
    native = next(one for one in all_backends() if one.name == "native")
    assert native.open is NativeBackend
    assert native.capabilities.problem(suited, StepKind.PADDED) == "it does not compute CUDA graphs"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_the_paged_kernel_is_used_on_a_gpu(tmp_path: Path, dtype: str, block_size: int) -> None:
    setting = setting_for(tiny.save(tmp_path, tiny.llama(head_dim=64)), "cuda", block_size, dtype)
    chosen = choose_backend(setting, StepKind.RAGGED)
    assert chosen.name == "triton"
    assert chosen.capabilities.packs_steps
