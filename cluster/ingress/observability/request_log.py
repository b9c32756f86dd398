"""One log line per request. It has ids, names, counts and times; never prompts, answers, keys or an error's text."""

from __future__ import annotations

import logging

from cluster.ingress.observability.request_record import Fields

logger = logging.getLogger("pilotfish.requests")


def log_request(fields: Fields) -> None:
    """Log one request. A formatter for JSON finds the fields in the attribute `fields` of the log record."""
    if logger.isEnabledFor(logging.INFO):
        known = {name: value for name, value in fields.items() if value is not None and value != []}
        text = " ".join(f"{name}={_shown(value)}" for name, value in known.items())
        logger.info("request %s", text, extra={"fields": known})


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
