"""Pilotfish's drafters for vLLM: a class for vLLM's speculative method `custom_class`."""

from __future__ import annotations

from pilotfish_vllm.proposer import Proposer

__all__ = ["Proposer"]
