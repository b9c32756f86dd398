"""Compiled code is loaded only from a folder that this user owns and nobody else may write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.models import tiny
from workers.forward import code_folder
from workers.forward.code_folder import UnsafeFolder, folder_fault, keep_compiled_code, make_private_folder
from workers.forward.native import build
from workers.forward.native.packed_linear import PackedLinear
from workers.model.loading import load_model
from workers.serve.configuration import load_configuration

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUTE_DSL_CACHE_DIR")
OTHER_USER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has loaded no kernels and whose environment names no folder."""
    monkeypatch.setattr(code_folder, "_chosen", {})
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    build.own_library.cache_clear()
    yield
    build.own_library.cache_clear()


@pytest.fixture(params=["written by the group", "written by all", pytest.param("of another user", marks=needs_root)])
def unsafe(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    directory = tmp_path / "code"
    directory.mkdir()
    if request.param == "of another user":
        os.chown(directory, OTHER_USER, OTHER_USER)
    else:
        directory.chmod(0o775 if "group" in request.param else 0o707)
    return directory


def test_a_new_folder_is_private(tmp_path: Path) -> None:
    make_private_folder(tmp_path / "a" / "code")
    assert (tmp_path / "a" / "code").stat().st_mode & 0o777 == 0o700
    assert folder_fault(tmp_path / "a" / "code") is None


def test_an_unsafe_folder_is_refused_with_a_remedy(unsafe: Path) -> None:
    with pytest.raises(UnsafeFolder, match=r"chmod go-w|PILOTFISH_CODE_DIR"):
        make_private_folder(unsafe)


@pytest.mark.usefixtures("fresh")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
class TestKernels:
    def test_a_library_in_an_unsafe_folder_is_not_loaded(self, unsafe: Path, caplog: pytest.LogCaptureFixture) -> None:
        make_private_folder(unsafe.parent / "own")
        planted = unsafe / build._build(shutil.which("cc") or "", unsafe.parent / "own").name
        planted.write_bytes(b"what somebody else put there")
        library = build.load_library(str(unsafe))
        assert library is not None, caplog.text
        assert not library._name.startswith(str(unsafe))
        assert "built again for this process" in caplog.text
        assert build.kernel_identity(str(unsafe)) is None  # so no packed weights are read from there either
        weight, rows = torch.randn(33, 250), torch.randn(5, 250)
        found = PackedLinear(weight, torch.float32, directory=str(unsafe)).multiply(rows)
        torch.testing.assert_close(found, rows @ weight.T, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("kind", ["written by all", pytest.param("of another user", marks=needs_root), "a link"])
    def test_a_library_that_others_can_change_is_built_again(
        self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(build, "_SOURCES", ("one.c",))
        monkeypatch.setattr(build, "_code", lambda: {"one.c": b"int one(void) { return 1; }"})
        planted, original = tmp_path / "kernels.so", tmp_path / "original"
        original.write_bytes(b"what somebody else put there")
        if kind == "a link":
            planted.symlink_to(original)
        else:
            shutil.copy(original, planted)
            planted.chmod(0o666 if kind == "written by all" else 0o644)
            if kind == "of another user":
                os.chown(planted, OTHER_USER, OTHER_USER)
        library = build._compile("cc", ["-fPIC"], "kernels.so", tmp_path)
        assert library == planted
        assert library.read_bytes()[:4] == b"\x7fELF"
        assert code_folder.is_private_file(library)


@pytest.mark.usefixtures("fresh")
class TestCompilers:
    def test_their_folders_lie_in_that_of_compiled_code(self, tmp_path: Path) -> None:
        keep_compiled_code(str(tmp_path / "code"))
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "code" / "inductor")
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "code" / "triton")
        assert os.environ["CUTE_DSL_CACHE_DIR"] == str(tmp_path / "code" / "cute")

    def test_an_unsafe_folder_is_not_used(self, unsafe: Path, caplog: pytest.LogCaptureFixture) -> None:
        keep_compiled_code(str(unsafe))
        assert "not kept" in caplog.text
        for variable in VARIABLES:
            found = Path(os.environ[variable])
            assert unsafe not in found.parents
            assert folder_fault(found.parent) is None

    def test_an_unsafe_folder_that_the_environment_names_is_not_used(
        self, unsafe: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(unsafe))
        keep_compiled_code(None)
        assert os.environ["TRITON_CACHE_DIR"] != str(unsafe)

    def test_a_folder_that_the_environment_names_stays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "mine"))
        keep_compiled_code(str(tmp_path / "code"))
        assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "mine")

    def test_loading_a_model_chooses_them(self, tmp_path: Path) -> None:
        directory = tiny.save(tmp_path / "model", tiny.llama())
        target = {"path": str(directory), "device": "cpu", "native": "off", "compile_directory": str(tmp_path / "code")}
        load_model(load_configuration({"target": target}).target)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "code" / "inductor")
