"""How the processes of a cluster log: the least severe level, and text or one JSON object per line."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """Writes a log record as one JSON object. The attribute `fields` of a record brings more of its members."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, object] = getattr(record, "fields", {})
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.msg.partition(" ")[0] if fields else record.getMessage(),
            **fields,
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_logging(level: str, form: str) -> None:
    """Set the level of this process's log, and with the form `json` write every record as JSON to all handlers."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    if form != "json":
        return
    if not root.handlers:
        root.addHandler(logging.StreamHandler())
    for handler in root.handlers:
        handler.setFormatter(JsonFormatter())
