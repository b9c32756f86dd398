"""One registry for every kind of plug-in."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cluster.core.config.base import PluginSettings
from cluster.core.config.registry import Registry
from cluster.core.errors import ConfigurationError


@dataclass(frozen=True)
class Plugin:
    settings: type[PluginSettings] = PluginSettings


def registry(*names: str) -> Registry[Plugin]:
    made: Registry[Plugin] = Registry("draft.method", "tests.support")
    for name in names:
        made.register(name, Plugin())
    return made


def test_plugins_are_found_by_name_and_listed_in_order() -> None:
    made = registry("b", "a")
    assert made.names() == ("a", "b")
    assert [name for name, _ in made.items()] == ["a", "b"]
    assert made.get("a") == Plugin()


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match=r"draft\.method: 'a' is registered twice"):
        registry("a", "a")


def test_an_unknown_name_is_refused_with_all_names_and_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"'gram' is unknown; it must be one of ngram, none \(.* is ngram\)"):
        registry("ngram", "none").get("gram")


def test_a_long_unknown_name_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigurationError) as caught:
        registry("ngram").get("x" * 100_000)
    assert len(str(caught.value)) < 300


def test_the_files_of_a_package_are_imported_before_the_first_lookup() -> None:
    from workers.draft.registry import METHODS

    assert {"none", "ngram", "model", "synthetic"} <= set(METHODS.names())
