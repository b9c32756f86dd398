"""`python -m tests.pages`: write the generated pages, or, with `--check`, say which are out of date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.pages import benchmarks, draft_formats, errors, metrics, parameters, settings

REFERENCE = Path(__file__).resolve().parents[2] / "deploy" / "docs" / "reference"
PAGES = {
    REFERENCE / "settings.md": settings.page,
    REFERENCE / "metrics.md": metrics.page,
    REFERENCE / "parameters.md": parameters.page,
    REFERENCE / "errors.md": errors.page,
    REFERENCE / "draft-formats.md": draft_formats.page,
    benchmarks.PAGE: benchmarks.page,
}


def main(*, is_check: bool) -> int:
    """Write or check all pages. Returns the exit status."""
    stale = []
    for file, page in PAGES.items():
        text = page()
        if not file.exists() or file.read_text("utf-8") != text:
            stale.append(file.name)
            if not is_check:
                file.write_text(text, "utf-8")
    if is_check:
        print(f"out of date: {', '.join(stale)}; run make pages, then commit" if stale else "pages: up to date")
        return bool(stale)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.pages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    sys.exit(main(is_check=parser.parse_args().check))
