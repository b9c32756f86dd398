"""`pilotfish drafts`: what a client taught is listed and rolled back for each of its salts, and for nobody else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.core.errors import ConfigurationError
from deploy.commands.drafts import Action, drafts
from workers.draft.common.learning import salt_key
from workers.serve.learning.versions import ABOUT, SERVED, versions_of

OWN, OTHER, BOB = (salt_key(salt) for salt in ("alice/", "alice/other", "bob/"))


def test_a_client_is_meant_with_all_its_salts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for key, client in ((OWN, OWN), (OTHER, OWN), (BOB, BOB)):
        for number in (1, 2):
            version = tmp_path / key / f"00000{number}"
            version.mkdir(parents=True)
            (version / ABOUT).write_text(json.dumps({"before": number - 1, "client": client}))
        (tmp_path / key / SERVED).write_text("2\n")
    settings = [f"draft.learn_directory={tmp_path}"]
    drafts(Action.LIST, None, settings, "alice")
    listed = capsys.readouterr().out
    assert OWN in listed and OTHER in listed and BOB not in listed
    drafts(Action.ROLLBACK, None, settings, "alice")
    assert {one.key: one.served for one in versions_of(tmp_path)} == {OWN: 1, OTHER: 1, BOB: 2}
    with pytest.raises(ConfigurationError, match="no version to go back from"):
        drafts(Action.ROLLBACK, None, settings, "carol")
    drafts(Action.ROLLBACK, None, settings)
    assert {one.key: one.served for one in versions_of(tmp_path)} == {OWN: 0, OTHER: 0, BOB: 1}


def test_a_list_without_versions_says_where_it_looked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafts(Action.LIST, None, [f"draft.learn_directory={tmp_path}"], "alice")
    assert capsys.readouterr() == ("", f"{tmp_path} has no learned versions of that client\n")
    drafts(Action.LIST, None, [f"draft.learn_directory={tmp_path / 'lernt'}"])
    assert capsys.readouterr() == ("", f"{tmp_path / 'lernt'} does not exist\n")


def test_a_directory_of_an_unknown_user_is_refused_with_its_setting() -> None:
    with pytest.raises(
        ConfigurationError, match=r"draft\.learn_directory: needed a known user, found ~no\.body/drafts"
    ):
        drafts(Action.LIST, None, ["draft.learn_directory=~no.body/drafts"])


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / OWN / "000001").mkdir(parents=True)
    (tmp_path / OWN / SERVED).write_text("1\n")
    (tmp_path / ".lock").mkdir()  # as root, a test may write everything else
    with pytest.raises(ConfigurationError, match=r"needed one that this user may write; .*\.lock"):
        drafts(Action.ROLLBACK, None, [f"draft.learn_directory={tmp_path}"])
    assert versions_of(tmp_path)[0].served == 1
