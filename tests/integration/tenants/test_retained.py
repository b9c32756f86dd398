"""Whatever holds something of a request, in any form, is found."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from tests.integration.tenants.retained import Snapshot

SOURCE = """
from collections import OrderedDict, deque
from dataclasses import dataclass
from functools import cache
import numpy as np

latest = ""
table = {}

def listen(text):
    global latest
    latest = text
    table[text] = 1

class Store:
    def __init__(self):
        self.texts = OrderedDict()
        self.rows = np.zeros(1 << 20, dtype=np.int32)
        self.count = 0
    def keep(self, text):
        self.texts[hash(text)] = None
        self.rows[len(text)] += 1
        self.count += 1

class Slotted:
    __slots__ = ("_texts",)
    def __init__(self):
        self._texts = deque(maxlen=1)
    def keep(self, text):
        self._texts.append(text)

@dataclass(frozen=True)
class Value:
    text: str = ""

class Holder:
    def __init__(self):
        self.value = Value()
    def keep(self, text):
        self.value = Value(text)

class Mapped(dict):
    def keep(self, text):
        self[text] = text

def closed():
    seen = []
    def keep(text):
        seen.append(text)
    return keep

def default(text, seen=[]):
    seen.append(text)

@cache
def cached(text):
    return text

def running():
    seen = []
    while True:
        seen.append((yield))

class Made:
    def __init__(self, text):
        self.text = text

made = {}
def keep_made(text):
    made["one"] = Made(text)
"""


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Any]:
    """A module of the product with every form of store."""
    file = tmp_path / "planted.py"
    file.write_text(SOURCE, encoding="utf-8")
    spec = spec_from_file_location("cluster.planted", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["cluster.planted"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["cluster.planted"]


@pytest.mark.slow
def test_every_form_of_store_is_found_and_numbers_are_not(planted: Any) -> None:
    stores = [planted.Store(), planted.Slotted(), planted.Holder(), planted.Mapped()]
    closed, running = planted.closed(), planted.running()
    next(running)

    def use(text: str) -> None:
        for keep in (planted.listen, planted.default, planted.cached, planted.keep_made, closed, running.send):
            keep(text)
        for store in stores:
            store.keep(text)

    use("first")
    before = Snapshot()
    assert not Snapshot().changed_since(before) & EVERY_FORM
    use("second")
    found = Snapshot().changed_since(before)
    assert found >= EVERY_FORM
    assert not {"Store.count", "Value.text"} & found


EVERY_FORM = {
    "cluster.planted.latest",
    "cluster.planted.table",
    "Store.texts",
    "Store.rows",
    "Slotted._texts",
    "Holder.value",
    "Mapped.items",
    "closed.<locals>.keep.seen",
    "default.0",
    "cached",
    "running.seen",
    "cluster.planted.made",
    "Made.text",
}
