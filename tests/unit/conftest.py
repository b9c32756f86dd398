"""What all unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest


@pytest.fixture(scope="package", autouse=True)
def _one_authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """HTTP clients trust one authority: reading all that are known takes 50 ms in every client that a test makes."""
    file = tmp_path_factory.mktemp("authority") / "ca.crt"
    first, end, _ = Path(certifi.where()).read_text("utf-8").partition("-----END CERTIFICATE-----")
    file.write_text(first + end, "utf-8")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SSL_CERT_FILE", str(file))
        yield
