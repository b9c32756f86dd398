"""One door for every setting: what is unknown, out of bounds or at odds is refused in words that help."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from cluster.core.config import Configuration, Section, known_keys, load
from cluster.core.errors import ConfigurationError


def refusal(values: dict[str, object], overrides: dict[str, object] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(values, overrides)
    return str(caught.value)


def test_nothing_set_gives_the_defaults() -> None:
    assert load({}) == Configuration()


def test_values_are_taken_and_the_rest_stays_as_it_is() -> None:
    configuration = load({"target": {"dtype": "bfloat16"}, "log_level": "debug"})
    assert (configuration.target.dtype, configuration.log_level) == ("bfloat16", "debug")
    assert configuration.target.kv == Configuration().target.kv


@pytest.mark.parametrize(
    ("values", "key", "nearest"),
    [
        ({"target": {"dtpye": "float32"}}, "target.dtpye", "target.dtype"),
        ({"draft": {"max_node": 4}}, "draft.max_node", "draft.max_nodes"),
        ({"target": {"kv": {"blocksize": 4}}}, "target.kv.blocksize", "target.kv.block_size"),
        ({"log_levle": "info"}, "log_levle", "log_level"),
        ({"draft": {"kv": {"host_bytes": 1}}}, "draft.kv.host_bytes", "draft.kv.pool_bytes"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_named(values: dict[str, object], key: str, nearest: str) -> None:
    assert refusal(values) == f"{key}: unknown key; the nearest valid one is {nearest}"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("target.kv.block_size", 0, "greater than or equal to 1"),
        ("target.tensor_parallel", 65, "less than or equal to 64"),
        ("draft.timeout_seconds", 0, "greater than 0"),
        ("draft.max_nodes", 257, "less than or equal to 256"),
        ("scheduler.max_step_tokens", 15, "greater than or equal to 16"),
        ("server.http_port", 70000, "less than or equal to 65535"),
        ("target.kv.memory_fraction", 1.0, "less than or equal to 0.95"),
        ("target.dtype", "float8", "'float32', 'bfloat16' or 'float16'"),
        ("scheduler.max_sequences", "many", "valid integer"),
        ("log_level", None, "'debug'"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_key_and_its_bound(key: str, value: object, words: str) -> None:
    message = refusal({}, {key: value})
    assert message.startswith(f"{key}: ")
    assert words in message


def test_overrides_win_over_the_file_and_leave_it_untouched() -> None:
    values = {"target": {"kv": {"block_size": 8}, "dtype": "float16"}}
    configuration = load(values, {"target.kv.block_size": 32, "server.http_port": 0})
    assert (configuration.target.kv.block_size, configuration.server.http_port) == (32, 0)
    assert configuration.target.dtype == "float16"
    assert values == {"target": {"kv": {"block_size": 8}, "dtype": "float16"}}


def test_an_override_can_make_a_section_that_the_file_lacks() -> None:
    configuration = load({"draft": {"model": None}}, {"draft.model.path": "somewhere", "draft.method": "model"})
    assert configuration.draft.model is not None
    assert configuration.draft.model.path == "somewhere"


def test_an_override_below_a_plain_value_is_refused() -> None:
    assert refusal({"log_level": "info"}, {"log_level.deeper": 1}) == "log_level.deeper: log_level is not a section"


def test_an_override_with_an_unknown_key_is_refused_with_the_nearest_named() -> None:
    assert "the nearest valid one is scheduler.max_waiting" in refusal({}, {"scheduler.max_wait": 3})


def test_values_at_odds_with_one_another_are_refused() -> None:
    message = refusal({"draft": {"ngram_min": 5, "ngram_max": 2}})
    assert message == "draft: ngram_min (5) must be at most ngram_max (2)"
    assert "draft.model.path" in refusal({"draft": {"method": "model"}})
    assert "prefix_cache (False) must be true" in refusal({"target": {"kv": {"prefix_cache": False, "host_bytes": 1}}})


def test_every_fault_is_told_at_once() -> None:
    message = refusal({"target": {"dtpye": 1}}, {"draft.max_nodes": -1})
    assert "target.dtpye" in message and "draft.max_nodes" in message


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(refusal({"target": {"dtype": "x" * 10_000}})) < 300


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Configuration().log_level = "debug"  # type: ignore[misc]


def test_every_key_is_known_and_described() -> None:
    keys = known_keys()
    assert {"target.path", "draft.model.path", "target.kv.pool_bytes", "log_level"} <= set(keys)
    assert len(keys) == len(set(keys))
    sections: list[type[Section]] = [Configuration, *Section.__subclasses__()]
    undescribed = [
        f"{section.__name__}.{name}"
        for section in sections
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert undescribed == []
