"""`python -m workers.forward.native.prebuild`: build the CPU kernels for common instruction sets beside the code.

For images, which run on other processors than they are built on and have no compiler.
"""

from __future__ import annotations

import platform
import sys

from workers.forward.native.build import INSTRUCTION_SETS, PREBUILT, build_for


def main() -> None:
    """Build every library that is missing, and name each."""
    if platform.machine() != "x86_64":
        sys.stdout.write(f"no kernels are built for {platform.machine()}: models run the modules of PyTorch\n")
        return
    for instruction_set in INSTRUCTION_SETS:
        sys.stdout.write(f"{build_for(instruction_set, PREBUILT)}\n")


if __name__ == "__main__":
    main()
