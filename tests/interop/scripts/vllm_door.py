"""Answers prompts greedily in vLLM: plain, with a drafter of Pilotfish, or with an EAGLE-3 head in vLLM itself.

    vllm_door.py JSON

Runs in vLLM's environment. The argument has `model`, `prompts`, `max_tokens`, `drafted` (tokens a draft, 0 for none),
`head` (directory of the head) and `door`, the settings of pilotfish-vllm, which are read without a head. Prints
`begun`, then `half` when the first half of the prompts is answered, then one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    from vllm import LLM, SamplingParams

    chosen: dict[str, Any] = json.loads(sys.argv[1])
    drafts: dict[str, Any] = {}
    if chosen.get("head"):
        head = {"method": "eagle3", "model": chosen["head"], "num_speculative_tokens": chosen["drafted"]}
        drafts = {"speculative_config": head}
    elif chosen["drafted"]:
        drafts = {
            "speculative_config": {
                "method": "custom_class",
                "model": "pilotfish_vllm.Proposer",
                "num_speculative_tokens": chosen["drafted"],
            },
            "additional_config": {"pilotfish": chosen["door"]},
        }
    model = LLM(
        chosen["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        disable_log_stats=False,
        **drafts,
    )
    say("begun")
    parameters = SamplingParams(temperature=0.0, max_tokens=chosen["max_tokens"])
    messages = [[{"role": "user", "content": prompt}] for prompt in chosen["prompts"]]
    middle = len(messages) // 2
    begun = time.perf_counter()
    answers = model.chat(messages[:middle], parameters, use_tqdm=False)
    say("half")
    answers += model.chat(messages[middle:], parameters, use_tqdm=False)
    seconds = time.perf_counter() - begun
    counts = {one.name: getattr(one, "value", 0) for one in model.get_metrics() if "spec_decode" in one.name}
    found = {
        "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
        "texts": [answer.outputs[0].text for answer in answers],
        "steps": counts.get("vllm:spec_decode_num_drafts", 0),
        "drafted": counts.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0),
        "seconds": seconds,
    }
    say(json.dumps(found))


if __name__ == "__main__":
    main()
