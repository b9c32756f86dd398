"""The directory of a draft is replaced as a whole: whatever happens meanwhile, one draft is there."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any, NoReturn

import pytest

from cluster.core.errors import ConfigurationError
from workers.distill.output import check_replaceable, replaced_directory


def write(directory: Path, weights: str) -> None:
    with replaced_directory(directory, "# A draft", {}) as scratch:
        (scratch / "config.json").write_text('{"pilotfish_draft": {}}')
        (scratch / "weights").write_text(weights)


def written(directory: Path) -> str:
    return (directory / "weights").read_text()


def interrupted(*_: object, **__: object) -> NoReturn:
    raise KeyboardInterrupt


def test_an_interruption_while_the_former_draft_is_removed_keeps_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "draft", "1")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "draft", "2")

    assert written(tmp_path / "draft") == "2"


def test_where_the_new_draft_cannot_take_the_place_the_former_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "draft", "1")
    rename = Path.rename

    def refused(source: Path, goal: Path) -> Path:
        if goal == tmp_path / "draft" and written(source) == "2":
            raise OSError("no room for a name")
        return rename(source, goal)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(OSError, match="no room for a name"):
        write(tmp_path / "draft", "2")

    assert written(tmp_path / "draft") == "1"
    assert [entry.name for entry in tmp_path.iterdir()] == ["draft"]


def across(source: Path, goal: Path) -> NoReturn:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(goal))


@pytest.fixture
def overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a draft in a lower layer of an overlay file system, which renames none of its directories."""
    write(tmp_path / "draft", "1")
    lower, rename = (tmp_path / "draft").stat().st_ino, Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda path, goal: (across if path.stat().st_ino == lower else rename)(path, goal)
    )
    return tmp_path


def test_a_draft_that_cannot_be_renamed_is_replaced(overlay: Path) -> None:
    write(overlay / "draft", "2")

    assert written(overlay / "draft") == "2"
    assert [entry.name for entry in overlay.iterdir()] == ["draft"]


@pytest.mark.parametrize("broken", ["copytree", "rmtree"])
def test_where_it_cannot_be_copied_or_removed_it_stays(
    broken: str, overlay: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where some of its files were removed."""
    original, calls = getattr(shutil, broken), list[Path]()

    def fails(path: Path, *arguments: Any, **named: Any) -> object:
        calls.append(path)
        if len(calls) > 1:
            return original(path, *arguments, **named)
        if broken == "copytree":
            (arguments[0] / "README.md").write_text("a part")
        else:
            (path / "weights").unlink()
        raise OSError("no space left")

    monkeypatch.setattr(shutil, broken, fails)
    with pytest.raises(OSError, match="no space left"):
        write(overlay / "draft", "2")

    assert written(overlay / "draft") == "1" and (overlay / "draft" / "README.md").read_text() == "# A draft"
    assert [entry.name for entry in overlay.iterdir()] == ["draft"]


def test_a_draft_that_is_named_by_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "draft").symlink_to(tmp_path / "disk" / "first")

    for weights in ("1", "2"):
        write(tmp_path / "draft", weights)

        assert (tmp_path / "draft").is_symlink() and written(tmp_path / "disk" / "first") == weights


def test_a_mount_point_is_refused_because_nothing_can_be_renamed_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "draft").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "draft")

    with pytest.raises(ConfigurationError, match=r"--out .*draft: needed a directory that can be renamed, found a mou"):
        check_replaceable(tmp_path / "draft")
