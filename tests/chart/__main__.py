"""`python -m tests.chart`: write what is generated in the chart, or, with `--check`, say what is out of date.

Generated are the schema of `settings`, what the chart knows of the presets, and the table of values in the README.
"""

from __future__ import annotations

import argparse
import sys

from tests.chart.settings_schema import generated
from tests.chart.values_table import README, table_page

parser = argparse.ArgumentParser(
    prog="python -m tests.chart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is out of date")
is_check = parser.parse_args().check
stale = []
for file, text in (generated() | {README: table_page()}).items():
    if not file.exists() or file.read_text("utf-8") != text:
        stale.append(file.name)
        if not is_check:
            file.write_text(text, "utf-8")
if is_check:
    print(f"out of date: {', '.join(stale)}; run make chart, then commit" if stale else "chart: up to date")
    sys.exit(bool(stale))
