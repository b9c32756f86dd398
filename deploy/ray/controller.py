"""What Pilotfish changes in the process of Ray Serve's controller, which supervises all replicas.

Serve calls `started` in that process when the variable `RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH` names it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from workers.serve.logs import forward_warnings

_LAST_OOM_SCORE = 0
"""How readily the kernel ends the controller when memory is used up: after every other process of the cluster."""


def started() -> None:
    """Keep the kernel from ending this process before the others, and send its warnings to `serve`."""
    with suppress(OSError):  # not on every platform
        Path("/proc/self/oom_score_adj").write_text(str(_LAST_OOM_SCORE))
    forward_warnings("controller")
