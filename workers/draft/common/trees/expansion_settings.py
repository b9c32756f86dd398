"""Settings of the methods that expand draft trees."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from cluster.core.config.base import PluginSettings


class ExpansionSettings(PluginSettings):
    """When and how widely draft trees are expanded."""

    mode: Literal["serial", "run_ahead", "enumerate"] = "enumerate"
    """When a tree is expanded: `serial` only within a call, `run_ahead` also between calls below the proposed paths,
    `enumerate` between calls anywhere in the tree."""
    width: Annotated[int, Field(ge=1, le=32)] = 4
    """Most nodes of one tree that one forward pass expands."""

    @property
    def has_lookup(self) -> bool:
        """Whether tokens that followed the same tokens earlier in the sequence are added to the trees."""
        return False
