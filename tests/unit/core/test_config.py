"""Settings that are unknown, out of bounds or contradictory are refused with an error that helps to correct them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from cluster.core.config.base import UNSHARED, shared_settings
from cluster.core.config.load import known_keys, load
from cluster.core.config.sections import Configuration
from cluster.core.errors import ConfigurationError
from workers.draft.ngram import NgramSettings
from workers.serve.configuration import PLUGINS


def refusal(values: dict[str, object], overrides: dict[str, object] | None = None) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(values, overrides, PLUGINS)
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
        ({"draft": {"model": {"kv": {"host_bytes": 1}}}}, "draft.model.kv.host_bytes", "draft.model.kv.pool_bytes"),
        ({"srever": {"http_port": 1}}, "srever", "server"),
        ({"target": {"kvv": {"sinks": 1}}}, "target.kvv", "target.kv"),
        ({"draft": {"egale": {"path": "x"}}}, "draft.egale", "draft.eagle"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_named(values: dict[str, object], key: str, nearest: str) -> None:
    assert refusal(values) == f"{key}: unknown key; the nearest valid one is {nearest}"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("server.port", "ones are server.http_port, server.grpc_port, server.operations_port"),
        ("port", "ones are server.http_port, server.grpc_port, server.operations_port"),
        ("target.pool_bytes", "one is target.kv.pool_bytes"),
        ("target.http_port", "one is server.http_port"),
        ("draft.timeout", "one is draft.timeout_seconds"),
        ("server.timeout", "ones are server.start_timeout_seconds, server.drain_timeout_seconds"),
    ],
)
def test_an_unknown_key_is_refused_with_the_settings_that_have_its_words(key: str, meant: str) -> None:
    assert refusal({}, {key: 1}) == f"{key}: unknown key; the nearest valid {meant}"


@pytest.mark.parametrize("values", [{"fish": 1}, {"fish": {"sinks": 1}}, {"server": {"colour": "red"}}])
def test_a_key_that_resembles_none_is_refused_without_a_guess(values: dict[str, object]) -> None:
    assert refusal(values).endswith(": unknown key; deploy/docs/reference/settings.md lists all")


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
        ("limits.max_timeout_seconds", float("inf"), "finite number"),
        ("target.kv", 3, "it must be a section with keys of its own"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_its_key_and_its_bound(key: str, value: object, words: str) -> None:
    message = refusal({}, {key: value})
    assert message.startswith(f"{key}: ")
    assert words in message


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("draft.methods", "suffix", "draft.methods: 'suffix' is refused; it must be a list, as in [a, b]"),
        ("draft.methods", [1], "draft.methods[0]: 1 is refused; input should be a valid string"),
        ("cluster.tls.ca", "ca.pem", "cluster.tls.certificate: must be set; cluster.tls.key: must be set"),
        (
            "draft.heads.tree",
            "all",
            "draft.heads.tree: 'all' is refused; input should be 'auto'; "
            "draft.heads.tree: 'all' is refused; it must be a list, as in [a, b]",
        ),
    ],
)
def test_a_refused_value_is_named_by_its_key_and_its_place_in_a_list(key: str, value: object, message: str) -> None:
    assert refusal({}, {key: value}) == message


@pytest.mark.parametrize("value", [{"hue": 1}, [{"hue": 1}], [["red"]]])
def test_no_refusal_names_a_type_of_the_program(value: object) -> None:
    for key in known_keys(PLUGINS):
        message = refusal({}, {key: value})
        assert re.search(r"tuple|constrained|literal|field required", message) is None, message


def test_overrides_win_over_the_file_and_leave_it_untouched() -> None:
    values = {"target": {"kv": {"block_size": 8}, "dtype": "float16"}}
    configuration = load(values, {"target.kv.block_size": 32, "server.http_port": 0})
    assert (configuration.target.kv.block_size, configuration.server.http_port) == (32, 0)
    assert configuration.target.dtype == "float16"
    assert values == {"target": {"kv": {"block_size": 8}, "dtype": "float16"}}


def test_an_override_can_make_a_section_that_the_file_lacks() -> None:
    overrides = {"draft.model.path": "somewhere", "draft.method": "model"}
    configuration = load({"draft": {"model": None}}, overrides, PLUGINS)
    assert configuration.draft.weights is not None
    assert configuration.draft.weights.path == "somewhere"


def test_an_override_below_a_plain_value_is_refused() -> None:
    assert refusal({"log_level": "info"}, {"log_level.deeper": 1}) == "log_level.deeper: log_level is not a section"


def test_contradictory_values_are_refused() -> None:
    message = refusal({"draft": {"ngram": {"min": 5, "max": 2}}})
    assert message == "draft.ngram: min (5) must be at most max (2)"
    message = refusal({"draft": {"method": "model"}})
    assert message.startswith("draft.model: path must be set to a draft model, best with the target's tokenizer")
    assert "prefix_cache (False) must be true" in refusal({"target": {"kv": {"prefix_cache": False, "host_bytes": 1}}})
    message = refusal({"target": {"replicas": 3, "autoscaling": {"max_replicas": 2}}})
    assert message == "target: autoscaling.max_replicas (2) must be 0 or at least replicas (3)"


def test_all_errors_are_reported_at_once() -> None:
    message = refusal({"target": {"dtpye": 1}}, {"draft.max_nodes": -1})
    assert "target.dtpye" in message and "draft.max_nodes" in message


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(refusal({"target": {"dtype": "x" * 10_000}})) < 300


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Configuration().log_level = "debug"  # type: ignore[misc]


def test_a_plugins_settings_are_typed_and_have_their_defaults() -> None:
    configuration = load({"draft": {"ngram": {"max": 3}}}, {}, PLUGINS)
    assert configuration.draft.settings("ngram", NgramSettings) == NgramSettings(max=3)
    assert load({}, {}, PLUGINS).draft.settings("ngram", NgramSettings) == NgramSettings()
    assert Configuration().draft.settings("ngram", NgramSettings) == NgramSettings()


def test_a_configuration_with_plugins_passes_between_processes() -> None:
    overrides = {"draft.ngram.max": 3, "draft.method": "model", "draft.model.path": "somewhere"}
    configuration = load({}, overrides, PLUGINS)
    assert load(configuration.model_dump(mode="json"), {}, PLUGINS) == configuration
    assert load(json.loads(configuration.model_dump_json()), {}, PLUGINS) == configuration


def test_only_a_selected_method_has_weights() -> None:
    chosen = {"draft.method": "model", "draft.model.path": "somewhere"}
    assert load({}, chosen, PLUGINS).draft.weights is not None
    assert load({}, chosen | {"draft.method": "ngram"}, PLUGINS).draft.weights is None


def test_a_section_of_a_plugin_that_is_not_registered_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^draft\.ngram: unknown key"):
        load({"draft": {"ngram": {"max": 3}}})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ngram_max", "ngram.max"),
        ("ngram_min", "ngram.min"),
        ("ngram_candidates", "ngram.candidates"),
        ("mode", "model.mode"),
        ("width", "model.width"),
        ("candidates", "model.candidates"),
        ("lookup", "model.lookup"),
        ("kv", "model.kv"),
        ("synthetic_acceptance", "synthetic.acceptance"),
        ("synthetic_seconds", "synthetic.seconds"),
    ],
)
def test_a_key_of_an_earlier_version_is_refused_with_its_new_name(old: str, new: str) -> None:
    assert refusal({"draft": {old: 1}}) == f"draft.{old}: unknown key; it is now draft.{new}"
    assert f"draft.{new.removesuffix('.kv')}" in " ".join(known_keys(PLUGINS))


def fields(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from fields(field.annotation, f"{prefix}{name}.")


def all_fields() -> dict[str, FieldInfo]:
    found = dict(fields(Configuration))
    for registry in PLUGINS:
        for name, plugin in registry.items():
            found |= dict(fields(plugin.settings, f"{registry.section}.{name}."))
    return found


SWITCHES = {
    key: set(get_args(field.annotation))
    for key, field in all_fields().items()
    if {"on", "off"} & set(get_args(field.annotation))
}


@pytest.mark.parametrize("key", SWITCHES)
def test_every_choice_among_on_and_off_takes_the_booleans_of_yaml(key: str) -> None:
    for word, truth in (("on", True), ("off", False)):
        if word in SWITCHES[key]:
            assert load({}, {key: truth}, PLUGINS) == load({}, {key: word}, PLUGINS)
        else:
            assert refusal({}, {key: truth}).startswith(f"{key}: {word!r} is refused; input should be ")


def test_the_kernels_can_be_switched_off() -> None:
    assert "target.native" in SWITCHES
    assert load({}, {"target.native": False}).target.native == "off"


def test_every_key_is_known_and_described() -> None:
    keys = known_keys(PLUGINS)
    assert {"target.path", "draft.model.path", "draft.ngram.max", "target.kv.pool_bytes", "log_level"} <= set(keys)
    assert len(keys) == len(set(keys))
    assert [key for key, field in all_fields().items() if not field.description] == []


def test_a_setting_of_targets_or_drafters_is_unshared_wherever_its_name_is() -> None:
    """A count of processes or threads, or their place, in one plug-in and shared in another one is a mistake."""
    own = {key: field for key, field in all_fields().items() if key.startswith(("target.", "draft."))}
    unshared = {key for key, field in own.items() if UNSHARED in field.metadata}
    names = {key.rpartition(".")[2] for key in unshared}
    assert {"replicas", "autoscaling", "threads", "device", "node_resource", "sequences"} <= names
    assert {key for key in own if key.rpartition(".")[2] in names} == unshared


def test_the_settings_that_are_shared_leave_out_those_of_sections_inside() -> None:
    configuration = load({"target": {"kv": {"sequences": 3}}, "draft": {"model": {"device": "cpu"}}}, {}, PLUGINS)
    shared = shared_settings(configuration.target) | shared_settings(configuration.draft)
    assert {"path", "kv", "max_nodes", "model"} <= shared.keys()
    assert not {"replicas", "threads", "device"} & shared.keys()
    assert "sequences" not in shared["kv"] and "block_size" in shared["kv"]
    assert "device" not in shared["model"] and "path" in shared["model"]


def test_every_setting_is_read() -> None:
    root = Path(__file__).parents[3]
    files = (file for part in ("cluster", "workers", "deploy") for file in (root / part).rglob("*.py"))
    read = {name for file in files for name in re.findall(r"\.(\w+)", file.read_text("utf-8"))}
    by_keyword = {"target.autoscaling.sequences_per_replica"}
    assert {key for key in all_fields() if key.rpartition(".")[2] not in read} == by_keyword
