"""Settings of the package for vLLM: each refusal names the key, the value and the bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pilotfish_vllm.settings import RefusedSettings, Settings, read_settings
from tests.support.certificates import make_certificate

ADDRESS = {"PILOTFISH_DRAFTER": "there:9100"}


def test_the_environment_has_the_address_and_the_token() -> None:
    assert read_settings(None, ADDRESS | {"PILOTFISH_CLUSTER_TOKEN": "secret\n"}) == Settings("there:9100", "secret")


def test_the_section_overrides_the_environment(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("other\n")
    section = {"address": "here:1", "token_file": str(tmp_path / "token"), "timeout_seconds": 2}
    found = read_settings(section, ADDRESS | {"PILOTFISH_CLUSTER_TOKEN": "secret"})
    assert found == Settings("here:1", "other", None, 2.0)
    assert found.metadata == (("x-pilotfish-cluster-token", "other"),)


def test_no_representation_shows_the_token() -> None:
    assert "secret" not in repr(read_settings(None, ADDRESS | {"PILOTFISH_CLUSTER_TOKEN": "secret"}))


def test_certificates_have_the_name_of_a_clusters(tmp_path: Path) -> None:
    tls = make_certificate(tmp_path)
    section = {"tls": {"ca": tls.ca, "certificate": tls.certificate, "key": tls.key}}
    found = read_settings(section, ADDRESS).tls
    assert found is not None and found.server_name == "pilotfish"


@pytest.mark.parametrize("text", ["", "\n", "two\nlines\n"])
def test_a_token_file_has_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(RefusedSettings, match=r"token_file .*: needed one line with the token"):
        read_settings({"token_file": str(tmp_path / "token")}, ADDRESS)


@pytest.mark.parametrize("token", ["two\nlines", "two words", "t\u00f6ken"])
def test_a_token_of_the_environment_has_one_line(token: str) -> None:
    with pytest.raises(RefusedSettings, match="PILOTFISH_CLUSTER_TOKEN: needed one line with the token") as refused:
        read_settings(None, ADDRESS | {"PILOTFISH_CLUSTER_TOKEN": token})
    assert token not in str(refused.value)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"adress": "a:1"}, "additional_config.pilotfish.adress: unknown; it must be one of address, token_file"),
        ({"address": "a"}, "'a' is refused; it must be HOST:PORT"),
        ({"address": ":1"}, "must be HOST:PORT"),
        ("a:1", "additional_config.pilotfish: 'a:1' is refused; it must be an object"),
        ({"timeout_seconds": 0}, "timeout_seconds: 0 is refused; it must be above 0 and at most 60"),
        ({"timeout_seconds": 61}, "timeout_seconds: 61 is refused"),
        ({"timeout_seconds": True}, "timeout_seconds: True is refused"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds: nan is refused"),
        ({"token_file": "/nowhere"}, "token_file: needed a readable ASCII file, found '/nowhere'"),
        ({"token_file": "~nobody-here/token"}, "token_file: needed a readable ASCII file, found '~nobody-here/token'"),
        ({"tls": {"ca": "/nowhere"}}, "additional_config.pilotfish.tls: "),
        ({"tls": {"key": "/nowhere"}}, "certificate and key: needed both or neither"),
        ({"tls": {"name": "x"}}, "additional_config.pilotfish.tls.name: unknown"),
    ],
)
def test_a_refusal_names_the_key_the_value_and_the_bound(section: Any, said: str) -> None:
    with pytest.raises(RefusedSettings) as refused:
        read_settings(section, ADDRESS)
    assert said in str(refused.value)


def test_an_address_is_needed() -> None:
    with pytest.raises(RefusedSettings, match="address or PILOTFISH_DRAFTER: None is refused"):
        read_settings({}, {})
