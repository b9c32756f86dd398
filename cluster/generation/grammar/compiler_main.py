"""Compiles grammars in a process of its own, one after another, as a check.

Each line of the standard input is a JSON object: `source`, `is_ebnf` (whether it may be EBNF instead of Lark's syntax),
`limits` (arguments of `LLParserLimits`) and `seconds` of processor time. Each is answered by one line of JSON on the
standard output: `error`, which is empty for a good grammar, and `source` in Lark's syntax. The process ends when a
grammar takes more time or crashes it, and at the end of its input. It imports nothing of this project, so that the file
can be run by its path.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

_MEMORY_BYTES = 4 << 30
"""Most address space of this process."""
_STACK_BYTES = 1 << 20
"""Stack of the thread that compiles: less than any thread that compiles the same grammar later has."""


def compile_one(request: dict[str, Any], vocabulary: LLTokenizer) -> dict[str, str]:
    """Compile a grammar and compute what it allows at its beginning. Returns the answer to the request."""
    source = request["source"]
    try:
        if request["is_ebnf"]:
            source = any_to_lark(source)
        matcher = LLMatcher(vocabulary, source, limits=LLParserLimits(**request["limits"]), log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
            matcher.compute_ff_tokens()
        return {"source": source, "error": matcher.get_error() if matcher.is_error() else ""}
    except (Exception, RecursionError) as error:  # the library raises bare exceptions
        return {"source": "", "error": str(error) or type(error).__name__}


def main() -> None:
    """Answer requests until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    vocabulary = LLTokenizer("byte")
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # ends the process, if nothing stops it
        answer = compile_one(request, vocabulary)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    threading.stack_size(_STACK_BYTES)
    worker = threading.Thread(target=main)
    worker.start()
    worker.join()
