"""A model directory says what its weights were before they were de-quantized, and a target hands it on."""

from __future__ import annotations

from pathlib import Path

from tests.support.models import tiny
from workers.model.dequantized import dequantized_from, write_dequantized_from
from workers.model.packaged.catalogue import PACKAGED_MODELS


def test_plain_weights_were_nothing_else(tmp_path: Path) -> None:
    assert dequantized_from(tiny.save(tmp_path / "model", tiny.llama())) == ""


def test_a_note_is_read_again(tmp_path: Path) -> None:
    write_dequantized_from(tmp_path, "GGUF Q4_K, Q6_K")
    assert dequantized_from(tmp_path) == "GGUF Q4_K, Q6_K"


def test_the_packaged_target_is_a_4_bit_model(tmp_path: Path) -> None:
    assert dequantized_from(tmp_path / "smollm2-135m-instruct") == "GGUF Q4_1, embedding Q8_0"
    ggufs = [name for name, model in PACKAGED_MODELS.items() if not model.is_marian]
    assert all("GGUF" in PACKAGED_MODELS[name].quantized for name in ggufs)
