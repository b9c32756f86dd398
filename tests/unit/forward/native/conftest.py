"""The compiled CPU kernels of this processor, and those that compute as tile registers do."""

from __future__ import annotations

import pytest

from tests.support.engines.kept_kernels import EMULATED_TILES, portable
from workers.forward.native import build


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of the compiled kernel."""
    return str(tmp_path_factory.mktemp("code"))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a kernel that computes as tile registers do, on any processor."""
    directory = str(tmp_path_factory.mktemp("emulated"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "_FLAGS", portable(*EMULATED_TILES))
        library = build.load_library(directory)
    assert library is not None
    assert library.pilotfish_has_tiles() == 1
    return directory
