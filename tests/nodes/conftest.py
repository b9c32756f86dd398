"""Prompts for the packaged model, and the answers of the model alone, as in the tests of `tests/integration`."""

from __future__ import annotations

from tests.integration.conftest import greedy, prompts, sampled

__all__ = ["greedy", "prompts", "sampled"]
