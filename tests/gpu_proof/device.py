"""Where the tests of the kernels run: on a GPU, or interpreted on the CPU."""

from __future__ import annotations

import os

import pytest
import torch

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not IS_INTERPRETED else "cpu")


def needs_kernels() -> list[pytest.MarkDecorator]:
    """The marks of a module whose tests run kernels: on a GPU they are among those of `pytest -m cuda`."""
    pytest.importorskip("triton", reason="triton is not installed: make gpu-proof installs it")
    if DEVICE.type == "cuda":
        return [pytest.mark.cuda]
    reason = "the kernels run on a GPU, or are interpreted with TRITON_INTERPRET=1"
    return [pytest.mark.skipif(not IS_INTERPRETED, reason=reason)]
