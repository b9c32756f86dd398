"""Finds the list of decoder layers in a model of `transformers`, and a layer's name in a tensor-parallel plan."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn


def decoder_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The decoder layers: the members of the model's longest module list."""
    lists = [getattr(parent, name) for parent, name in _outer_lists(model)]
    yield from max(lists, key=len, default=[])


def decoder_list(model: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds the list of decoder layers, and the list's name in it."""
    return max(_outer_lists(model), key=lambda entry: len(getattr(*entry)))


def plan_name(path: str) -> str:
    """The name of a module in a plan: the numbers of layers are `*`. Those in names, as of `fc1`, stay."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _outer_lists(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The lists of modules that are in no other list: a layer of T5 is itself a list of parts."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList):
            yield model, name
        else:
            yield from _outer_lists(child)
