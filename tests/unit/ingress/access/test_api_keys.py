"""API keys: how they are written down, found, compared and read again."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest

from cluster.core.errors import ConfigurationError, Unauthenticated
from cluster.ingress.access.api_keys import ApiKey, parse_keys
from cluster.ingress.access.key_ring import KeyRing, bearer_key
from deploy.settings import load_settings

ALICE, BOB, OPERATOR = "alice-key-0123456789", "bob-key-0123456789", "operator-key-0123456789"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_names_a_key_and_what_it_allows() -> None:
    hashed = sha256(BOB.encode()).hexdigest()
    text = f"# clients\n\nalice {ALICE}\n bob  sha256:{hashed} learn\nops {OPERATOR} admin\n"
    alice, bob, operator = parse_keys(text, "keys")
    assert alice == ApiKey("alice", sha256(ALICE.encode()).digest())
    assert bob == ApiKey("bob", sha256(BOB.encode()).digest(), allows_learning=True)
    assert operator.is_admin and not alice.is_admin
    assert not operator.allows_learning and not alice.allows_learning


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("alice short-secret", "16 to 512 characters"),
        (f"alice {'x' * 513}", "16 to 512 characters"),
        ("alice", "16 to 512 characters"),
        (f"al/ice {ALICE}", "a name of 1 to 64"),
        (f"alice {ALICE} root", "any of admin"),
        ("alice sha256:ABCDEF0123456789", "64 hexadecimal digits"),
        (f"alice {ALICE}\u00e4", "printable ASCII"),
    ],
)
def test_a_wrong_line_is_refused_and_its_key_is_not_shown(line: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as refused:
        parse_keys(line, "keys.txt")
    assert "keys.txt, line 1" in str(refused.value)
    assert "secret" not in str(refused.value) and ALICE not in str(refused.value)


def test_names_and_keys_are_different() -> None:
    with pytest.raises(ConfigurationError, match="found alice twice"):
        KeyRing(parse_keys(f"alice {ALICE}\nalice {BOB}", "keys"))
    with pytest.raises(ConfigurationError, match="the key of bob twice"):
        KeyRing(parse_keys(f"alice {ALICE}\nbob {ALICE}", "keys"))


def test_a_ring_finds_the_key_that_is_presented() -> None:
    ring = KeyRing(parse_keys(f"alice {ALICE}\nbob {BOB}", "keys"), own_key=OPERATOR)
    assert ring.demands_keys
    assert [ring.identify(key).name for key in (ALICE, BOB, OPERATOR)] == ["alice", "bob", "pilotfish"]
    assert ring.identify(OPERATOR).is_internal and not ring.identify(ALICE).is_internal
    for wrong in ("", "x" * 600, ALICE[:-1], ALICE + " ", "sha256:" + sha256(ALICE.encode()).hexdigest(), "\udc80"):
        with pytest.raises(Unauthenticated, match="not valid"):
            ring.identify(wrong)


def test_without_keys_everybody_may_call() -> None:
    assert not KeyRing().demands_keys
    assert not KeyRing(own_key=OPERATOR).demands_keys


def test_a_changed_file_is_read_again_and_removed_keys_are_refused(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys.txt", Clock()
    file.write_text(f"alice {ALICE}\n")
    ring = KeyRing(file=str(file), clock=clock)
    file.write_text(f"bob {BOB}\nops {OPERATOR} admin\n")
    assert ring.identify(ALICE).name == "alice"  # it is not looked at for every request
    clock.now += 1
    assert ring.identify(BOB).name == "bob"
    with pytest.raises(Unauthenticated):
        ring.identify(ALICE)
    file.write_text("")
    clock.now += 1
    with pytest.raises(Unauthenticated):
        ring.identify(BOB)


@pytest.mark.parametrize("broken", ["bob tooshort", None], ids=["malformed", "removed"])
def test_a_file_that_cannot_be_read_leaves_the_keys_as_they_were(
    tmp_path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "keys.txt", Clock()
    file.write_text(f"alice {ALICE}\n")
    ring = KeyRing(file=str(file), clock=clock)
    file.unlink()
    if broken is not None:
        file.write_text(broken)
    clock.now += 1
    assert ring.identify(ALICE).name == "alice"
    assert "the API keys stay as they were" in caplog.text
    assert "tooshort" not in caplog.text


def test_a_directory_has_a_file_per_key_as_a_mounted_secret_has(tmp_path: Path) -> None:
    versions, clock = tmp_path / "..2026", Clock()
    versions.mkdir()
    (versions / "alice").write_text(f"{ALICE}\n")
    (versions / "ops").write_text(f"{OPERATOR} admin")
    (tmp_path / "..data").symlink_to(versions)
    for name in ("alice", "ops"):
        (tmp_path / name).symlink_to(tmp_path / "..data" / name)
    ring = KeyRing(file=str(tmp_path), clock=clock)
    assert ring.identify(ALICE).name == "alice"
    assert ring.identify(OPERATOR).is_admin
    (tmp_path / "alice").unlink()
    clock.now += 1
    with pytest.raises(Unauthenticated):
        ring.identify(ALICE)


def test_a_missing_or_empty_file_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needed a readable file or directory"):
        KeyRing(file=str(tmp_path / "missing"))
    with pytest.raises(ConfigurationError, match=r"server\.api_key_file: needed a known user, found ~no\.body/keys"):
        KeyRing(file="~no.body/keys")
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(ConfigurationError, match="at least one API key"):
        KeyRing(file=str(tmp_path / "empty"))


def test_a_bearer_key_follows_the_scheme() -> None:
    assert bearer_key(f"Bearer {ALICE}") == bearer_key(f"bearer  {ALICE} ") == ALICE
    for wrong in ("", ALICE, f"Basic {ALICE}", "Bearer", "Bearer "):
        with pytest.raises(Unauthenticated, match="Authorization: Bearer KEY"):
            bearer_key(wrong)


def test_the_environment_brings_keys_and_the_settings_keep_no_key() -> None:
    variables = {"PILOTFISH_API_KEYS": f"alice {ALICE}; ops {OPERATOR} admin", "PILOTFISH_API_KEY": BOB}
    settings = load_settings("cpu", environment=variables)
    assert [key.name for key in settings.api_keys] == ["alice", "ops"]
    assert settings.demands_keys and settings.api_key == BOB
    assert not any(secret in repr(settings) for secret in (ALICE, BOB, OPERATOR))
    assert not load_settings("cpu", environment={}).demands_keys
    assert load_settings("cpu", ["server.api_key_file=/etc/keys"], {}).demands_keys
