"""The attention kernels, compiled ahead of time for three generations of GPUs by the assembler that Triton brings."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_proof.assembler import assembled, compiled_ahead, next_power_of_two

pytestmark = compiled_ahead()

MOST_REGISTERS, MOST_SHARED = 255, 160 * 1024
CAPABILITIES = [80, 90, 100]
HEADS = [
    *((1, 64), (4, 64), (8, 64), (1, 128), (2, 128), (4, 128), (8, 128), (16, 128), (32, 128)),
    *((1, 256), (4, 256), (8, 256), (16, 256)),
]
"""Query heads that share a KV head, and the size of a head, of served models."""
PADDED_HEADS = [(1, 80), (4, 80), (16, 80), (1, 96), (8, 96), (32, 96), (16, 112), (12, 192), (16, 192)]
"""Query heads that share a KV head, and the size of a head, where that size is no power of two."""


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("group", "dim"), [*HEADS, (32, 256), *PADDED_HEADS])
def test_attention_of_few_tokens_does_not_spill(capability: int, group: int, dim: int) -> None:
    check_attention(group, dim, capability, is_wide=False)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 128), (16, 128), (2, 256), (16, 256), (4, 80), (16, 192)])
def test_attention_of_prompts_does_not_spill(capability: int, group: int, dim: int) -> None:
    check_attention(group, dim, capability, is_wide=True)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("stored", [1, 2])
@pytest.mark.parametrize(
    ("group", "dim", "is_wide"),
    [
        *((group, dim, False) for group, dim in ((1, 64), (8, 128), (16, 128), (32, 128), (2, 256), (16, 256))),
        (16, 80, False), (16, 192, False), (1, 64, True), (8, 128, True), (4, 80, True), (2, 256, True),
    ],
)  # fmt: skip
def test_attention_over_keys_and_values_of_8_bits_does_not_spill(
    capability: int, group: int, dim: int, is_wide: bool, stored: int
) -> None:
    check_attention(group, dim, capability, is_wide=is_wide, stored=stored)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize(
    ("group", "dim", "options"),
    [
        (8, 64, {"extra": True}),
        (2, 256, {"extra": True}),
        (4, 128, {"kind": "fp16"}),
        (4, 128, {"words": 1}),
    ],
    ids=["gpt-oss", "gemma-2", "float16", "trees"],
)
def test_attention_with_sinks_caps_and_trees_does_not_spill(
    capability: int, group: int, dim: int, is_wide: bool, options: dict[str, Any]
) -> None:
    check_attention(group, dim, capability, is_wide=is_wide, **options)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("is_wide", [False, True])
def test_attention_over_blocks_of_64_tokens_does_not_spill(capability: int, is_wide: bool) -> None:
    check_attention(4, 128, capability, is_wide=is_wide, size=64)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (4, 128), (2, 256)])
def test_attention_of_float32_does_not_spill(capability: int, group: int, dim: int, is_wide: bool) -> None:
    """The default type. Its products are exact, so tensor cores, which round it to TF32, compute none."""
    check_attention(group, dim, capability, is_wide=is_wide, kind="fp32")


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(
    ("group", "dim", "options"),
    [
        (4, 128, {}), (4, 64, {}), (3, 80, {}), (4, 96, {}), (4, 128, {"kind": "fp16"}),
        (4, 128, {"stored": 1}),
    ],
)  # fmt: skip
def test_a_query_has_the_same_bits_in_tiles_of_both_sizes(
    capability: int, group: int, dim: int, options: dict[str, Any]
) -> None:
    """A tall tile repeats the instructions of a short one for its other rows, in the same layout of numbers in threads.

    One operation, of numbers that all rows share, is not repeated.
    """
    from workers.forward.triton.attention import launch_of
    from workers.forward.triton.tiles import tall_tile

    tall = tall_tile(group, dim)
    launch = launch_of(group, dim, is_wide=False, capability=capability, kind=options.get("stored", 0))
    short, long, both = (
        assembled_attention(launch, group, dim, capability, is_wide=False, tile=tile, short=least, **options)
        for tile, least in ((tall // 2, tall // 2), (tall, tall), (tall, tall // 2))
    )
    assert {layout_of(one) for one in short.sums} == {layout_of(one) for one in long.sums}
    assert long.sums | short.sums == both.sums
    assert long.tensor_products == 2 * short.tensor_products
    assert long.fused in {2 * short.fused - 1, 2 * short.fused}
    assert both.fused == short.fused + long.fused
    assert both.spilled_bytes == 0, both
    assert both.registers <= (launch.registers or MOST_REGISTERS)
    assert both.shared_bytes <= MOST_SHARED
    assert both.tensor_products == 3 * short.tensor_products


def layout_of(summed: str) -> str:
    """How the numbers of a sum lie in the threads, without the number of rows."""
    size, layout = summed.split(": ", 1)
    return f"{size.partition('x')[2]}: {layout}"


def check_attention(group: int, dim: int, capability: int, *, is_wide: bool, **options: Any) -> None:
    """Compile the kernel as it is launched, and check what it takes."""
    from workers.forward.triton.attention import launch_of
    from workers.forward.triton.tiles import narrow_tile, wide_tile

    tile = wide_tile(group, dim) if is_wide else narrow_tile(group, dim)
    is_exact = options.get("kind") == "fp32"
    launch = launch_of(
        group,
        dim,
        is_wide=is_wide,
        capability=capability,
        kind=options.get("stored", 0),
        is_exact=is_exact,
    )
    found = assembled_attention(launch, group, dim, capability, is_wide=is_wide, tile=tile, **options)
    assert found.spilled_bytes == 0, found
    assert found.registers <= (launch.registers or MOST_REGISTERS)
    assert found.shared_bytes <= MOST_SHARED
    assert (found.tensor_products > 0) is not is_exact


def assembled_attention(
    launch: Any, group: int, dim: int, capability: int, *, is_wide: bool, tile: int, **options: Any
) -> Any:
    """The kernel of attention for heads of `dim` numbers. `more` counts those that keys have beside their values."""
    from workers.forward.triton.attention import attend_tiles
    from workers.forward.triton.tiles import SPLIT_KEYS

    kind, extra, stored, more = (
        options.get(name, usual) for name, usual in (("kind", "bf16"), ("extra", False), ("stored", 0), ("more", 0))
    )
    pointers = dict.fromkeys(("queries", "keys", "values", "output"), f"*{kind}")
    if stored:
        pointers |= dict.fromkeys(("keys", "values"), "*i8")
    pointers |= dict.fromkeys(("sums", "stats"), "*fp32") | {"arrivals": "*i32", "sink_logits": f"*{kind}"}
    pointers |= dict.fromkeys(("items", "tokens", "lasts", "positions"), "*i32") | {"words": "*i64"}
    pointers |= dict.fromkeys(("starts", "blocks", "order", "counts"), "*i32") | {"scale": "fp32", "soft_cap": "fp32"}
    numbers = (
        "window",
        "sinks",
        "query_count",
        "most_blocks",
        "splits",
        "query_token",
        "query_head",
        "key_slot",
        "key_head",
    )
    numbers += ("value_slot", "value_head", "output_token", "output_head", "scale_slot")
    pointers |= dict.fromkeys(("key_scales", "value_scales"), "*fp32")
    width, short = next_power_of_two(dim), max(1, 16 // next_power_of_two(group))
    constants = {
        "HEADS": 4 * group, "GROUP": group, "GROUP_TILE": next_power_of_two(group),
        "TILE": max(tile, short), "SHORT": options.get("short", max(tile, short)),
        "WORDS": options.get("words", int(not is_wide)), "DIM": dim, "WIDTH": width,
        "SIZE": options.get("size", 16),
        "KEY_TILE": launch.keys, "SPLIT": SPLIT_KEYS, "IS_SPLIT": not is_wide, "HAS_CAP": extra, "HAS_SINKS": extra,
        "EXACT": kind == "fp32", "KIND": stored, "IS_LATENT": bool(more), "MORE": more, "MORE_WIDTH": max(16, more),
    }  # fmt: skip
    return assembled(
        attend_tiles,
        pointers | dict.fromkeys(numbers, "i32"),
        constants,
        capability,
        warps=launch.warps,
        stages=launch.stages,
        most_registers=launch.registers,
        aligned=[*list(pointers)[:8], *numbers[5:13]],
    )


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize(("group", "dim", "stored"), [(16, 512, 0), (16, 512, 2), (10, 256, 0)])
def test_latents_are_multiplied_on_tensor_cores(
    capability: int, group: int, dim: int, is_wide: bool, stored: int
) -> None:
    """Keys of 64 numbers more than their values, as DeepSeek-V3 has."""
    from workers.forward.triton.attention import launch_of

    launch = launch_of(group, dim, is_wide=is_wide, capability=capability, kind=stored, has_latents=True)
    found = assembled_attention(launch, group, dim, capability, is_wide=is_wide, stored=stored, more=64, tile=1)
    assert found.spilled_bytes == 0, found
    assert found.shared_bytes <= MOST_SHARED
    assert found.tensor_products > 0


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (32, 80)])
def test_keys_and_values_are_stored_without_spills(capability: int, heads: int, dim: int) -> None:
    from workers.forward.triton.kv_write import store_tokens

    pointers = dict.fromkeys(("keys", "values", "stored_keys", "stored_values"), "*bf16") | {"slots": "*i64"}
    numbers = ("key_token", "key_head", "value_token", "value_head")
    numbers += ("key_slot", "key_slot_head", "value_slot", "value_slot_head")
    constants = {
        "HEADS": heads,
        "DIM": dim,
        "WIDTH": next_power_of_two(heads * dim),
        "MOST": 3.3895313892515355e38,
        "HAS_VALUES": True,
    }
    found = assembled(store_tokens, pointers | dict.fromkeys(numbers, "i32"), constants, capability)
    assert found.spilled_bytes == 0


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (32, 80)])
@pytest.mark.parametrize("stored", [1, 2])
def test_keys_and_values_are_quantized_without_spills(capability: int, heads: int, dim: int, stored: int) -> None:
    from workers.forward.triton.kv_write import quantize_tokens

    pointers = dict.fromkeys(("keys", "values"), "*bf16") | dict.fromkeys(("stored_keys", "stored_values"), "*i8")
    pointers |= dict.fromkeys(("key_scales", "value_scales"), "*fp32") | {"slots": "*i64"}
    numbers = ("key_token", "key_head", "value_token", "value_head", "slot_stride", "head_stride", "scale_stride")
    constants = {"HEADS": heads, "DIM": dim, "HEAD_TILE": heads, "WIDTH": next_power_of_two(dim), "KIND": stored}
    found = assembled(quantize_tokens, pointers | dict.fromkeys(numbers, "i32"), constants, capability)
    assert found.spilled_bytes == 0


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dim", [896, 4096, 8192])
@pytest.mark.parametrize("adds", [False, True])
def test_norms_are_computed_without_spills(capability: int, dim: int, adds: bool) -> None:
    from workers.forward.triton.norm import NORM_WARPS, normalize_rows

    width = next_power_of_two(dim)
    pointers = dict.fromkeys(("rows", "added", "weight", "sums", "output"), "*bf16") | {"epsilon": "fp32"}
    constants = {"DIM": dim, "WIDTH": width, "ADDS": adds}
    assert assembled(normalize_rows, pointers, constants, capability, warps=NORM_WARPS).spilled_bytes == 0


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_gates_are_computed_without_spills(capability: int) -> None:
    from workers.forward.triton.gate import gate_columns

    arguments = dict.fromkeys(("gates", "values", "output"), "*bf16") | dict.fromkeys(("gate_row", "value_row"), "i32")
    assert assembled(gate_columns, arguments, {"WIDTH": 14336, "COLUMNS": 1024}, capability).spilled_bytes == 0


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (64, 8, 128), (14, 2, 64)])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("stored", [0, 1, 2])
def test_heads_are_rotated_and_stored_without_spills(
    capability: int, heads: int, kv_heads: int, dim: int, norms: bool, stored: int
) -> None:
    from workers.forward.triton.rotary import rotary_warps, rotate_token

    names = ("queries", "keys", "values", "cosines", "sines", "query_weight", "key_weight", "output")
    arguments = dict.fromkeys(names, "*bf16") | {"slots": "*i64", "epsilon": "fp32"}
    arguments |= dict.fromkeys(("stored_keys", "stored_values"), "*i8" if stored else "*bf16")
    arguments |= dict.fromkeys(("key_scales", "value_scales"), "*fp32")
    numbers = ("query_token", "key_token", "value_token", "cosine_token", "sine_token")
    numbers += ("key_slot", "key_slot_head", "value_slot", "value_slot_head", "scale_slot")
    constants = {
        "HEADS": heads, "KV_HEADS": kv_heads, "DIM": dim, "TURNED": dim, "WIDTH": dim,
        "HEAD_TILE": next_power_of_two(heads), "KV_TILE": kv_heads, "HAS_NORMS": norms,
        "MOST": 3.3895313892515355e38, "KIND": stored,
    }  # fmt: skip
    found = assembled(
        rotate_token, arguments | dict.fromkeys(numbers, "i32"), constants, capability, warps=rotary_warps(heads, dim)
    )
    assert found.spilled_bytes == 0
