"""Every type of a GGUF file is read to the bits that the package `gguf` de-quantizes it to."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from workers.forward.weights.gguf import gguf_storage

SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""First bytes of the float16 numbers in a block of each type."""


def drawn(name: str, outputs: int = 5, blocks: int = 3) -> np.ndarray:
    """Random bytes of a matrix. Its scales are finite."""
    draw, (_, size) = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    raw = draw.integers(0, 256, (outputs, blocks, size), dtype=np.uint8)
    for at in SCALES[name]:
        halves = draw.normal(size=(outputs, blocks, 1)).astype(np.float16)
        raw[..., at : at + 2] = halves.view(np.uint8).reshape(outputs, blocks, 2)
    return raw.reshape(outputs, -1)


@pytest.mark.parametrize("name", SCALES)
def test_dequantized_weights_are_those_of_gguf_bit_for_bit(name: str) -> None:
    raw = drawn(name)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    found = gguf_storage(name, torch.from_numpy(raw))
    assert found.dequantized().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("Q4_0", 4.5),
        ("Q4_1", 5),
        ("Q8_0", 8.5),
        ("Q2_K", 2.625),
        ("Q3_K", 3.5625),
        ("Q4_K", 4.625),
        ("Q5_K", 5.625),
        ("Q5_1", 6),
    ],
)
def test_weights_stay_small(name: str, bits: float) -> None:
    found = gguf_storage(name, torch.from_numpy(drawn(name)))
    assert found.nbytes * 8 == bits * found.outputs * found.inputs


@pytest.mark.parametrize("other", ["Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_types_of_one_layer_are_joined_in_8_bits_to_the_same_weights(other: str) -> None:
    parts = [gguf_storage(name, torch.from_numpy(drawn(name))) for name in ("Q3_K", other, "Q2_K")]
    joined = parts[0].joined(parts[1:])
    assert torch.equal(joined.dequantized(), torch.cat([part.dequantized() for part in parts]))
    assert joined.nbytes * 8 == 12 * joined.outputs * joined.inputs  # a scale and a minimum of 32 bits for 16 inputs


def test_plain_numbers_are_plain() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert gguf_storage("F32", torch.from_numpy(values.view(np.uint8))).dequantized().tolist() == values.tolist()
    halves = values.astype(np.float16)
    assert gguf_storage("F16", torch.from_numpy(halves.view(np.uint8))).dequantized().tolist() == values.tolist()


def test_an_unknown_type_is_named() -> None:
    with pytest.raises(ValueError, match=r"type IQ2_XS is not read; it must be one of F32, .*Q6_K"):
        gguf_storage("IQ2_XS", torch.zeros(1, 74, dtype=torch.uint8))
