"""Compiles grammars in a process of its own, one after another, as a check.

The argument is the path of the model's `tokenizer.json`. Each line of the standard input is a JSON object: `source`,
`is_ebnf` (whether it may be EBNF instead of Lark's syntax), `limits` (arguments of `LLParserLimits`) and `seconds` of
processor time. Each is answered by one line of JSON on the standard output: `source` in Lark's syntax, `error`, which
is empty for a good grammar, and `signal`, the signal that ended the compilation, or 0. `vocabulary` says why the file
cannot be used, if that is so. Each grammar is compiled by a child of this process, so a grammar that takes too long or
crashes ends nothing else. The process ends with its input. It imports nothing of this project, so that the file can be
run by its path.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from itertools import chain
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

_MEMORY_BYTES = 4 << 30
"""Most address space of a process."""
_STACK_BYTES = 1 << 20
"""Stack of a compilation: less than any thread that compiles the same grammar later has."""
_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|[?!]*start(?:\[[^\]\n]*\])?[ \t]*:(?!:=))", re.MULTILINE)
"""What a grammar has that is not EBNF: the rule `start`, which may have a prefix and attributes."""
_STEPS = 16
"""Tokens, or chains of forced tokens, of the answer that is tried."""


def compile_one(request: dict[str, Any], vocabulary: LLTokenizer) -> dict[str, str]:
    """Compile a grammar and follow an answer for some steps. Returns the answer to the request."""
    source = request["source"]
    try:
        if request["is_ebnf"]:
            source = source if _LARK.search(source) else gbnf_to_lark(source)
        matcher = LLMatcher(vocabulary, source, limits=LLParserLimits(**request["limits"]), log_level=0)
        _follow(matcher)
        return {"source": source, "error": matcher.get_error() if matcher.is_error() else ""}
    except (Exception, RecursionError) as error:  # the library raises bare exceptions
        return {"source": "", "error": str(error) or type(error).__name__}


def _follow(matcher: LLMatcher) -> None:
    """Write an answer of arbitrary allowed tokens, so that the limits of the first steps are met here."""
    for step in range(_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            return
        tokens = matcher.compute_ff_tokens()
        allowed = matcher.compute_bitmask()
        if not tokens and any(allowed):
            tokens = [_some_token(allowed, step)]
        if matcher.is_error() or matcher.try_consume_tokens(tokens) == 0:
            return


def _some_token(allowed: bytes, step: int) -> int:
    """Return one of the tokens whose bit is set. Different steps begin to search at different places."""
    start = step * 7919 % len(allowed)
    place: int = next(index for index in chain(range(start, len(allowed)), range(start)) if allowed[index])
    bits = allowed[place]
    return place * 8 + (bits & -bits).bit_length() - 1


def _in_a_child(request: dict[str, Any], vocabulary: LLTokenizer) -> dict[str, Any]:
    """Compile in a forked process of bounded time. Returns the answer to the request."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for inherited in (0, 1, readable):
                os.close(inherited)
            signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # ends the child, if nothing stops it
            with os.fdopen(writable, "w", encoding="utf-8") as pipe:
                json.dump(compile_one(request, vocabulary), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writable)
    with os.fdopen(readable, encoding="utf-8", errors="replace") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        return {**json.loads(answer), "signal": 0}
    return {"source": "", "error": "", "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else signal.SIGABRT}


def main() -> None:
    """Answer requests until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    try:
        vocabulary, problem = LLTokenizer(sys.argv[1]), ""
    except ValueError as error:
        vocabulary, problem = None, f"the model's {os.path.basename(sys.argv[1])} cannot be used: {error}"
    for line in sys.stdin:
        answer = {"source": "", "error": "", "signal": 0, "vocabulary": problem}
        if vocabulary is not None:
            answer = _in_a_child(json.loads(line), vocabulary)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
