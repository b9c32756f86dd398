"""After the tests, a table of what the assembler said of the kernels that they compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.gpu_proof.assembler import Compiled, compiled_kernels, table_of


@pytest.fixture(autouse=True)
def _keeps_what_is_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Properties of a test come back from the process that ran it."""
    first = len(compiled_kernels)
    yield
    request.node.user_properties.extend(("compiled", list(one)) for one in compiled_kernels[first:])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found = [
        Compiled(*value)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "teardown"  # the reports of a test share their properties
        for name, value in report.user_properties
        if name == "compiled"
    ]
    if found:
        terminalreporter.section("compiled kernels")
        for line in table_of(found):
            terminalreporter.write_line(line)
