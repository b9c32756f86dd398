"""Values of JSON of any depth are searched without recursion."""

from __future__ import annotations

import json

import pytest

from cluster.core.json_text import find_half, is_deeper_than

HALF = json.loads(r'"\ud83d"')
DEEP = 5000


def nested(levels: int, innermost: object) -> object:
    value = innermost
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (HALF, ("", HALF)),
        ("whole \N{FISH}", None),
        ({"a": ["x", {"b": HALF}], "c": HALF}, ("a[1].b", HALF)),
        ({"a": [[], {}], "c": [1, None, HALF]}, ("c[2]", HALF)),
        ({"a": {HALF: "x"}}, ("a", HALF)),
        ({HALF: "x"}, (HALF, HALF)),
    ],
)
def test_the_first_half_of_a_pair_is_found_with_its_field(value: object, found: tuple[str, object] | None) -> None:
    assert find_half(value) == found


def test_a_value_of_any_depth_is_searched() -> None:
    assert find_half(nested(DEEP, "x")) is None
    found = find_half(nested(DEEP, HALF))
    assert found is not None
    assert found[1] == HALF
    assert len(found[0]) < 1000


def test_the_depth_of_a_value_is_that_of_its_deepest_part() -> None:
    assert not is_deeper_than("text", 1)
    for levels in (1, 2, 64):
        value = {"a": [], "b": nested(levels - 1, 5)}
        assert not is_deeper_than(value, max(2, levels))
        assert is_deeper_than(nested(levels + 1, 5), levels)
