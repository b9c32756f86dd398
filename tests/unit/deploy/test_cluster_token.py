"""The cluster token comes from the environment, a file, the token of Ray or chance, and is never shown."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from cluster.core.errors import ConfigurationError
from cluster.wire.peer_access import ClusterToken
from deploy.network.cluster_token import draw_token, find_token
from deploy.settings import Settings, load_settings

GIVEN = "g" * 40
WRITTEN = "w" * 40


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "token"
    path.write_text(f" {WRITTEN}\n")
    return str(path)


def test_a_drawn_token_has_32_random_bytes() -> None:
    first, second = draw_token(), draw_token()
    assert first != second
    assert len(bytes.fromhex(first.text)) == 32


def test_the_environment_comes_before_the_file_and_the_file_before_the_token_of_ray_and_chance(file: str) -> None:
    ray = {"RAY_AUTH_TOKEN": "r" * 64}
    assert find_token({"PILOTFISH_CLUSTER_TOKEN": GIVEN} | ray, file).text == GIVEN
    assert find_token(ray, file).text == WRITTEN
    assert find_token({"PILOTFISH_CLUSTER_TOKEN": ""}, file).text == WRITTEN
    assert find_token({}, None) != find_token({}, None)


def test_applications_with_one_token_of_ray_have_one_cluster_token_which_does_not_show_it(tmp_path: Path) -> None:
    written = tmp_path / "ray"
    written.write_text("r" * 64 + "\n")
    token = find_token({"RAY_AUTH_TOKEN": "r" * 64}, None)
    assert token == find_token({"RAY_AUTH_TOKEN": "r" * 64}, None)
    assert token == find_token({"RAY_AUTH_TOKEN_PATH": str(written)}, None)
    assert token != find_token({"RAY_AUTH_TOKEN": "s" * 64}, None)
    assert "rr" not in token.text
    with pytest.raises(ConfigurationError, match=r"RAY_AUTH_TOKEN_PATH: needed a readable file, found .*nothing"):
        find_token({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "nothing")}, None)


def test_a_file_of_an_unknown_user_is_refused_with_its_setting() -> None:
    with pytest.raises(ConfigurationError, match=r"cluster\.token_file: needed a known user, found ~no\.body/token"):
        find_token({}, "~no.body/token")


def test_an_application_that_is_deployed_again_finds_the_token_that_ray_has_drawn(tmp_path: Path) -> None:
    """`ray start` with `RAY_AUTH_MODE=token` alone, as the page of settings shows it."""
    environment = {"RAY_AUTH_MODE": "token", "HOME": str(tmp_path)}
    assert find_token(environment, None) != find_token(environment, None)  # Ray has drawn none
    written = tmp_path / ".ray" / "auth_token"
    written.parent.mkdir()
    written.write_text("r" * 64)
    assert find_token(environment, None) == find_token({"RAY_AUTH_TOKEN": "r" * 64}, None)
    assert find_token(environment | {"RAY_AUTH_TOKEN": "s" * 64}, None) != find_token(environment, None)
    for unused in ({"HOME": str(tmp_path)}, {"RAY_AUTH_MODE": "disabled", "HOME": str(tmp_path)}):
        assert find_token(unused, None) != find_token(unused, None)


def test_settings_read_the_token(file: str) -> None:
    assert load_settings(None, (), {"PILOTFISH_CLUSTER_TOKEN": GIVEN}).access.token == ClusterToken(GIVEN)
    assert load_settings(None, (f"cluster.token_file={file}",), {}).access.token == ClusterToken(WRITTEN)


@pytest.mark.parametrize("text", ["short", "x" * 513, "a b" * 20, "ü" * 40, "tab\t" * 20])
def test_a_refused_token_is_not_part_of_the_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match="the cluster token: needed") as refused:
        find_token({"PILOTFISH_CLUSTER_TOKEN": text}, None)
    assert text not in str(refused.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cluster\.token_file: needed a readable file, found .*nothing"):
        find_token({}, str(tmp_path / "nothing"))
    (tmp_path / "binary").write_bytes(b"\xff" * 40)
    with pytest.raises(ConfigurationError, match=r"cluster\.token_file: needed ASCII"):
        find_token({}, str(tmp_path / "binary"))


def test_no_representation_shows_the_token(file: str) -> None:
    settings = load_settings(None, (f"cluster.token_file={file}",), {})
    for value in (settings, settings.access, settings.token, [settings.access]):
        assert WRITTEN not in f"{value!r} {value}"
    assert WRITTEN not in settings.configuration.model_dump_json()


def test_a_token_travels_between_processes_and_is_compared_there() -> None:
    token: ClusterToken = pickle.loads(pickle.dumps(draw_token()))  # noqa: S301 - our own bytes
    assert token.is_equal_to(token.text)
    assert token.is_equal_to(token.text.encode())
    assert not token.is_equal_to(token.text[:-1])
    assert not token.is_equal_to("\udcff")


def test_settings_without_a_token_draw_one() -> None:
    configuration = load_settings(None, (), {}).configuration
    assert Settings(configuration, Path()).token != Settings(configuration, Path()).token
