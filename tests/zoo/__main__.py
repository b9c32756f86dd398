"""`python -m tests.zoo [MODEL TYPE …]`: try every architecture of `transformers`, or some, and write the page."""

from __future__ import annotations

import argparse
import sys
import time
import warnings

import torch
from transformers.utils import logging

from tests.support.engines.kept_kernels import kept_kernels
from tests.zoo.configs import architectures
from tests.zoo.page import PAGE, page, written
from tests.zoo.ranks import TwoRanks
from tests.zoo.verdict import verdict


def main(names: list[str]) -> int:
    """Try the architectures of these names, or all. Returns 1 if one differs or fails."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    if unknown := sorted(set(names) - set(architectures())):
        print(f"transformers has no {', '.join(unknown)}")
        return 2
    verdicts = dict(written())
    wrong = False
    with kept_kernels(), TwoRanks() as two_ranks:
        for name in names or architectures():
            begun = time.perf_counter()
            found = verdicts[name] = verdict(name, two_ranks)
            wrong |= found.is_wrong
            said = f"{found.kind.value} {found.reason}{found.two_ranks and f'two ranks: {found.two_ranks}'}"
            print(f"{name}: {said} ({time.perf_counter() - begun:.1f} s)", flush=True)
            PAGE.write_text(page(verdicts.values()), "utf-8")  # an interrupted run keeps what it found
    return int(wrong)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MODEL_TYPE", help="as `transformers` names it (default: all)")
    sys.exit(main(parser.parse_args().names))
