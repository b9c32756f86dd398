"""Asks `/health` again and again from a process of its own, and prints how long the answers took.

    python -m tests.overload.probe URL

Ends when stdin is closed. Prints `[[seconds, status], …]` as JSON; status 0 is no answer.
"""

from __future__ import annotations

import http.client
import json
import sys
import threading
import time
from urllib.parse import urlsplit

INTERVAL_SECONDS = 0.25
LONGEST_SECONDS = 30.0


def ask(netloc: str) -> tuple[float, int]:
    """The time of one request on a connection of its own, and its status."""
    begun = time.perf_counter()
    connection = http.client.HTTPConnection(netloc, timeout=LONGEST_SECONDS)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except OSError:
        status = 0
    finally:
        connection.close()
    return time.perf_counter() - begun, status


def main() -> None:
    """Ask until stdin is closed."""
    netloc = urlsplit(sys.argv[1]).netloc
    closed = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), closed.set()), daemon=True).start()
    found = []
    while not closed.is_set():
        found.append(ask(netloc))
        closed.wait(INTERVAL_SECONDS)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
