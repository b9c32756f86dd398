"""`python -m tests.pages`: write the pages of `deploy/docs/reference`. `--check` says which are out of date."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.pages import errors, metrics, parameters, settings

REFERENCE = Path(__file__).resolve().parents[2] / "deploy" / "docs" / "reference"
PAGES = {"settings": settings.page, "metrics": metrics.page, "parameters": parameters.page, "errors": errors.page}


def main(arguments: list[str]) -> int:
    """Write or check all pages. Returns the exit status."""
    stale = []
    for name, page in PAGES.items():
        file, text = REFERENCE / f"{name}.md", page()
        if not file.exists() or file.read_text("utf-8") != text:
            stale.append(name)
            if "--check" not in arguments:
                file.write_text(text, "utf-8")
    if "--check" in arguments:
        print(f"out of date: {', '.join(stale)}; run make pages, then commit" if stale else "pages: up to date")
        return bool(stale)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
