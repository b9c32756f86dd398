"""The directories that make a start cold while they are empty."""

from __future__ import annotations

from pathlib import Path

CODE = "PILOTFISH_CODE_DIR"
"""The variable of the directory for compiled kernels and packed weights."""
_CACHES = (CODE, "PILOTFISH_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")


def cache_variables(caches: Path) -> dict[str, str]:
    """Variables of a process whose models and compiled code are in folders of `caches`."""
    return {name: str(caches / name.lower()) for name in _CACHES}
