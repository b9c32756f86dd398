"""Compares what Pilotfish computes with the `transformers` of this environment. Runs in that environment.

    transformers_layers.py

Runs the tests whose oracle is `transformers`: DFlash, layers for multi-token prediction (`MtpModel`) and PARD. Prints
one line of JSON: the version, `[format, cases, largest difference]` of each, and whether all passed.
"""

from __future__ import annotations

import importlib.metadata
import json

from tests.interop.draft_formats import COMPARISONS, compared


def main() -> None:
    rows, is_right = compared([one for one in COMPARISONS if one.oracle.startswith("transformers ")])
    found = {
        "version": importlib.metadata.version("transformers"),
        "rows": [[name, cases, difference] for name, _, _, cases, difference in rows],
        "is_right": is_right,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
