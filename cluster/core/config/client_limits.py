"""Limits of each client of the public APIs."""

from __future__ import annotations

from cluster.core.config.base import Positive, Section


class ClientLimitsSection(Section):
    """What each client may use; a line of the API key file may say otherwise. Every ingress counts for itself.

    Clients are told apart by the names of their API keys. Without keys, nothing is limited.
    """

    requests_per_minute: Positive | None = None
    """Most requests a minute; each prompt of a request counts. Unset: no limit."""
    tokens_per_minute: Positive | None = None
    """Most tokens of prompts and answers a minute; a request that begins within it is answered whole. Unset: no
    limit."""
    concurrent_answers: Positive | None = None
    """Most answers that are generated at a time. Unset: no limit."""
