"""Kernels that an image carries: built for common instruction sets, and used without a compiler."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.support.engines.kept_kernels import KEPT, copy_library, portable
from workers.forward.native import build
from workers.forward.native.build import INSTRUCTION_SETS, InstructionSet, processor_flags
from workers.forward.native.packed_linear import PackedLinear

FITTING = [one for one in INSTRUCTION_SETS if one.needed <= processor_flags()]
SMALLEST = INSTRUCTION_SETS[-1]

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or not FITTING, reason="needs a C compiler and a processor with AVX2"
)


@pytest.fixture(scope="module", autouse=True)
def _compiled_soon() -> Iterator[None]:
    """The compiler optimizes nothing."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "_FLAGS", portable())
        yield


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library for the smallest instruction set."""
    directory = tmp_path_factory.mktemp("prebuilt")
    copy_library(build.build_for(SMALLEST, KEPT), directory)
    return directory


@pytest.fixture
def image(prebuilt: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An image with that folder and without a compiler."""
    monkeypatch.setattr(build, "PREBUILT", prebuilt)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    build.own_library.cache_clear()
    yield prebuilt
    build.own_library.cache_clear()


@pytest.mark.slow
def test_an_image_without_a_compiler_runs_the_kernels(image: Path) -> None:
    library = build.load_library(None)
    assert library is not None and SMALLEST.name in library._name
    weight, rows = torch.randn(33, 250), torch.randn(5, 250)
    packed = PackedLinear(weight, torch.float32)
    torch.testing.assert_close(packed.multiply(rows), rows @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("trouble", ["other sources", "an older processor"])
def test_a_library_that_does_not_fit_is_not_loaded(
    image: Path, trouble: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if trouble == "other sources":
        monkeypatch.setattr(build, "_code", lambda: {"attention.c": b"another version"})
    else:
        monkeypatch.setattr(build, "processor_flags", lambda: SMALLEST.needed - {"fma"})
    assert build.load_library(None) is None
    assert "no C compiler found" in caplog.text


def test_the_largest_instruction_set_of_the_processor_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    for instruction_set in INSTRUCTION_SETS:
        (tmp_path / build._prebuilt_name(instruction_set)).touch()

    def found(flags: frozenset[str]) -> InstructionSet | None:
        monkeypatch.setattr(build, "processor_flags", lambda: flags)
        file = build._find_prebuilt()
        names = {build._prebuilt_name(one): one for one in INSTRUCTION_SETS}
        return None if file is None else names[file.name]

    for instruction_set in INSTRUCTION_SETS:
        assert found(instruction_set.needed | {"sse2"}) is instruction_set
    assert found(frozenset({"sse2"})) is None


def test_each_instruction_set_has_all_of_the_smaller_ones() -> None:
    for larger, smaller in pairwise(INSTRUCTION_SETS):
        assert larger.needed > smaller.needed
