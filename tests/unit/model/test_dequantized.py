"""A model directory says what its weights were before they were de-quantized, and a target hands it on."""

from __future__ import annotations

from pathlib import Path

from cluster.core.config.target_section import TargetSection
from tests.support.models import quantized, tiny
from workers.distill.card import computed_in
from workers.model.dequantized import dequantized_from, weights_in_words, write_dequantized_from
from workers.model.packaged.catalogue import PACKAGED_MODELS
from workers.model.stored.source import write_stored_in


def test_plain_weights_were_nothing_else(tmp_path: Path) -> None:
    assert dequantized_from(tiny.save(tmp_path / "model", tiny.llama())) == ""


def test_a_note_is_read_again(tmp_path: Path) -> None:
    write_dequantized_from(tmp_path, "GGUF Q4_K, Q6_K")
    assert dequantized_from(tmp_path) == "GGUF Q4_K, Q6_K"


def test_the_packaged_target_is_a_4_bit_model(tmp_path: Path) -> None:
    assert dequantized_from(tmp_path / "smollm2-135m-instruct") == "GGUF Q4_1, embedding Q8_0"
    ggufs = [name for name, model in PACKAGED_MODELS.items() if not model.is_marian]
    assert all("GGUF" in PACKAGED_MODELS[name].quantized for name in ggufs)


def test_cards_say_how_weights_are_stored(tmp_path: Path) -> None:
    plain = tiny.save(tmp_path / "plain", tiny.llama())
    assert weights_in_words(plain, "none") == ""
    settings = quantized.AWQ | {"group_size": 16}
    quantized.save(plain, tmp_path / "awq", quantized.awq(16), settings)
    assert weights_in_words(tmp_path / "awq", "stored") == "as they are stored (awq, 4 bits)"
    target = TargetSection(path=str(tmp_path / "awq"), quantization="stored", dtype="bfloat16")
    assert computed_in(target) == "bfloat16, weights as they are stored (awq, 4 bits)"
    plainly = target.model_copy(update={"quantization": "none"})
    assert computed_in(plainly) == "bfloat16, weights de-quantized from awq, 4 bits"

    write_dequantized_from(plain, "GGUF Q4_K, Q6_K")
    assert weights_in_words(plain, "none") == "de-quantized from GGUF Q4_K, Q6_K"
    assert computed_in(target.model_copy(update={"path": str(plain), "quantization": "int8"})) == (
        "bfloat16, weights rounded to int8"
    )
    (tmp_path / "model.gguf").touch()
    write_stored_in(plain, tmp_path / "model.gguf")
    (plain / "model.safetensors").unlink()
    assert weights_in_words(plain, "stored") == "as they are stored (GGUF Q4_K, Q6_K)"
