"""guidellm: a short synchronous run over chats and completions, streamed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import arguments, check, require, run

URL, _, MODEL = arguments()
TOKENIZER = sys.argv[4]
REQUESTS, TOKENS = 4, 16


def measure(route: str) -> str:
    """Run guidellm against a route. Every request must be complete, with the tokens that were asked for."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "report.json"
        command = [
            *(Path(sys.executable).with_name("guidellm"), "run", "--disable-progress"),
            *("--backend", f"kind=openai_http,target={URL},request_format={route}"),
            *("--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}"),
            *("--output", f"kind=json,path={file}"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600.0, check=False)
        require(done.returncode == 0, (done.stdout + done.stderr)[-500:])
        (found,) = json.loads(file.read_text())["benchmarks"]
    totals = found["metrics"]["request_totals"]
    require((totals["successful"], totals["errored"]) == (REQUESTS, 0), totals)
    tokens = found["metrics"]["output_token_count"]["successful"]
    require(tokens["min"] == tokens["max"] == TOKENS, tokens)
    return f"{REQUESTS} requests, {TOKENS} tokens each"


@check("synchronous run, /v1/chat/completions")
def chats() -> str:
    return measure("/v1/chat/completions")


@check("synchronous run, /v1/completions")
def completions() -> str:
    return measure("/v1/completions")


if __name__ == "__main__":
    run("guidellm")
