"""A running cluster of tiny or packaged models, and the processes in it."""

from __future__ import annotations

from tests.integration.conftest import draft_directory, reference, target_directory

__all__ = ["draft_directory", "reference", "target_directory"]
