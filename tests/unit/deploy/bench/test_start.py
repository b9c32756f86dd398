"""`start` measures each storage of weights from empty caches, and then with what that start has written."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from cluster.core.errors import ConfigurationError
from tests.bench.__main__ import SECTIONS
from tests.bench.options import parse
from tests.bench.processes.cache_variables import CODE
from tests.bench.processes.staged_serve import READY
from tests.bench.sections import start
from workers.model.packed_weights.store import FOLDER, SUFFIX


class FakeServe:
    """Takes the place of `ServeCommand`: a start writes into every cache, and packed weights last."""

    starts: ClassVar[list[tuple[tuple[str, ...], str, bool]]]
    """The settings of each start, the directory of its caches, and whether it found them empty."""

    def __init__(self, _: str | None, assignments: Sequence[str], __: str, environment: Mapping[str, str]) -> None:
        folders = [Path(one) for one in environment.values()]
        self.starts.append((tuple(assignments), str(folders[0].parent), not any(one.exists() for one in folders)))
        for folder in folders:
            folder.mkdir(exist_ok=True)
        self._packed = Path(environment[CODE]) / FOLDER / f"name{SUFFIX}"
        self.pid, self.stages = os.getpid(), [("models", time.time()), (READY, time.time() + 3)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._packed.exists():
            raise RuntimeError("ended before what a warm start reads was written")

    def write_packed(self, _: float) -> None:
        """Write the packed weights while the section waits."""
        self._packed.parent.mkdir(exist_ok=True)
        self._packed.touch()


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], str, bool]]:
    made: list[FakeServe] = []

    class Served(FakeServe):
        starts: ClassVar[list[tuple[tuple[str, ...], str, bool]]] = []

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(self)

    monkeypatch.setattr(start, "ServeCommand", Served)
    monkeypatch.setattr(start, "packed_file", lambda _: Path("anything"))
    monkeypatch.setattr(start, "cpu_seconds", lambda *_: {"the target": 1.0})
    monkeypatch.setattr(time, "sleep", lambda seconds: made[-1].write_packed(seconds))
    return Served.starts


def test_each_variant_starts_cold_and_then_warm(
    starts: list[tuple[tuple[str, ...], str, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, options = parse(SECTIONS, ["start", "--config", "cpu", "--repeats", "2", "--dtypes", "bfloat16"])
    start.run(options)
    variants = [("target.quantization=stored",), ("target.dtype=bfloat16", "target.quantization=none")]
    assert [settings for settings, _, _ in starts] == [one for one in variants for _ in range(2)] * 2
    assert [is_cold for _, _, is_cold in starts] == [True, False] * 4
    caches = [folder for _, folder, _ in starts]
    assert caches[::2] == caches[1::2] and len(set(caches)) == 4
    assert not any(Path(folder).exists() for folder in caches)
    printed = capsys.readouterr().out
    for column in ("stored, cold", "stored, warm", "bfloat16, cold", "bfloat16, warm"):
        assert column in printed


def test_variants_are_chosen_by_name() -> None:
    _, options = parse(SECTIONS, ["start", "--variants", "float32"])
    assert start.start_variants(options) == {"float32": ("target.dtype=float32", "target.quantization=none")}
    _, options = parse(SECTIONS, ["start", "--variants", "int8"])
    with pytest.raises(ConfigurationError, match=r"'int8'.*must be among stored, float32, bfloat16"):
        start.start_variants(options)
