"""`python -m tests.chart`: write what is generated in the chart, or, with `--check`, say what is out of date.

Generated are the schema of `settings`, what the chart knows of the presets, and the table of values in the README.
"""

from __future__ import annotations

import sys

from tests.chart.settings_schema import generated
from tests.chart.values_table import README, table_page

stale = []
for file, text in (generated() | {README: table_page()}).items():
    if not file.exists() or file.read_text("utf-8") != text:
        stale.append(file.name)
        if "--check" not in sys.argv[1:]:
            file.write_text(text, "utf-8")
if "--check" in sys.argv[1:]:
    print(f"out of date: {', '.join(stale)}; run make chart, then commit" if stale else "chart: up to date")
    sys.exit(bool(stale))
