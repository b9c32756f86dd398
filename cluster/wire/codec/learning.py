"""Codec of what a draft has learned."""

from __future__ import annotations

from dataclasses import asdict

from cluster.core import bounds
from cluster.core.verification import LearningStatus
from pilotfish.v1 import common_pb2 as pb


def encode_learning(status: LearningStatus) -> pb.LearningStatus:
    """Encode what a draft has learned."""
    return pb.LearningStatus(**asdict(status))


def decode_learning(message: pb.LearningStatus) -> LearningStatus:
    """Decode what a draft has learned. Raises `InvalidRequest`."""

    def count(name: str, most: int = bounds.MAX_TOKEN_ID) -> int:
        return bounds.integer(f"learning.{name}", getattr(message, name), 0, most)

    def tokens(name: str) -> float:
        return bounds.number(f"learning.{name}", getattr(message, name), 0.0, bounds.MAX_TREE_NODES + 1)

    return LearningStatus(
        version=count("version"),
        clients=count("clients"),
        texts=count("texts", bounds.MAX_EXACT_INTEGER),
        text_bytes=count("text_bytes", bounds.MAX_EXACT_INTEGER),
        taken=count("taken"),
        dropped=count("dropped"),
        failed=count("failed"),
        tokens_per_step_before=tokens("tokens_per_step_before"),
        tokens_per_step=tokens("tokens_per_step"),
    )
