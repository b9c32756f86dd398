"""The CPU kernels read sources as the modules do, and each source alike, whatever is read beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from cluster.core.config.model_section import ModelSection
from workers.forward.encoder_decoder import native_encoder
from workers.forward.encoder_decoder.encoder import SourceEncoder
from workers.forward.encoder_decoder.native_encoder import NativeSourceEncoder
from workers.forward.loaded_model import EncodedSources, SourceReader
from workers.forward.native.build import products
from workers.model import kernel_handover
from workers.model.loading import load_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")]

SOURCES = [tuple((11 * index + own) % 90 + 3 for index in range(length)) for own, length in enumerate((21, 1, 40, 7))]


def load(directory: Path, **settings: str) -> SourceReader:
    model = load_model(ModelSection.model_validate({"path": str(directory), "device": "cpu"} | settings))
    assert model.source is not None
    return model.source.encoder


def read(reader: SourceReader, sources: list[tuple[int, ...]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The states and the encoder's output of each source."""
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for batch in reader.encode(sources, torch.device("cpu")):
        assert isinstance(batch, EncodedSources)
        lengths = [len(sources[index]) for index in batch.indices]
        parts = zip(batch.states.split(lengths), batch.hidden.split(lengths), strict=True)
        found |= dict(zip(batch.indices, parts, strict=True))
    return [found[index] for index in range(len(sources))]


@pytest.mark.parametrize(
    ("settings", "bound"),
    [({}, 1e-5), ({"dtype": "bfloat16"}, 0.03), ({"quantization": "int8"}, 1e-3), ({"quantization": "int4"}, 1e-3)],
    ids=["float32", "bfloat16", "int8", "int4"],
)
def test_keys_values_and_states_are_those_of_the_modules(
    sourced_directory: Path, settings: dict[str, str], bound: float
) -> None:
    kernels, modules = (
        load(sourced_directory, **settings),
        load(sourced_directory, native="off", compile="off", **settings),
    )
    assert isinstance(kernels, NativeSourceEncoder) and isinstance(modules, SourceEncoder)
    for (found, hidden), (expected, states) in zip(read(kernels, SOURCES), read(modules, SOURCES), strict=True):
        assert kernel_handover.relative_error(found.flatten(1).float(), expected.flatten(1).float()) < bound
        assert kernel_handover.relative_error(hidden.float(), states.float()) < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_source_is_read_alike_beside_others(
    sourced_directory: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = load(sourced_directory, dtype=dtype)
    together = read(reader, SOURCES)
    monkeypatch.setattr(native_encoder, "_MOST_TOKENS", 30)
    in_parts = read(reader, SOURCES)
    for source, (one, _), (other, _) in zip(SOURCES, together, in_parts, strict=True):
        alone, _ = read(reader, [source])[0]
        assert torch.equal(one, alone) and torch.equal(other, alone)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_known_output_of_the_encoder_gives_the_same_keys_and_values(sourced_directory: Path, dtype: str) -> None:
    """The output is kept in bfloat16. Where products read float32, keys and values differ by its rounding.

    On tile registers (AMX), products of bfloat16 read bfloat16, so nothing differs there.
    """
    reads_bfloat16 = dtype == "bfloat16" and products(None).startswith("tiles 1")
    bound = 1e-6 if reads_bfloat16 else 0.02
    reader = load(sourced_directory, dtype=dtype)
    assert isinstance(reader, NativeSourceEncoder)
    for states, hidden in read(reader, SOURCES):
        found = reader.project(hidden)
        assert torch.equal(found.hidden, hidden)
        assert kernel_handover.relative_error(found.states.flatten(1).float(), states.flatten(1).float()) < bound


def test_tokens_that_the_encoder_does_not_have_are_refused(sourced_directory: Path) -> None:
    with pytest.raises(IndexError, match="the encoder has 96"):
        read(load(sourced_directory), [(3, 96)])


def test_an_encoder_whose_results_differ_keeps_its_modules(
    sourced_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kernel_handover._MAX_RELATIVE_ERROR, torch.float32, 0.0)
    assert isinstance(load(sourced_directory), SourceEncoder)
