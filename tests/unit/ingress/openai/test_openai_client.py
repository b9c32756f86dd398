"""The `openai` client against a whole cluster in this process, with a tiny random model and drafts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from deploy.local.local_cluster import LocalCluster
from tests.support.clusters.tiny_cluster import tiny_cluster
from tests.support.models import tiny, tiny_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECONDS = 120.0
PHRASE = [40, 41, 42, 43, 44, 45, 46]
PROMPT = [50, *PHRASE, 60, *PHRASE, 61, *PHRASE[:4]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tiny.save(tmp_path_factory.mktemp("fields"), tiny.llama(vocab_size=320))
    return tiny_tokenizer.byte_level(target)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(directory: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    draft = {"methods": ["prediction", "ngram"], "controller": "off"}
    configuration = tiny_cluster(directory, draft, scheduler={"max_step_tokens": 16})
    async with (
        LocalCluster(configuration, http=True) as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", timeout=SECONDS, max_retries=0) as client,
    ):
        yield client


async def tokens(client: openai.AsyncOpenAI, drafts: bool, **values: Any) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of them are accepted draft tokens."""
    extra = {"return_token_ids": True, "ignore_eos": True, **({} if drafts else {"max_draft_tokens": 0}), **values}
    answer = await client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=32, seed=3, extra_body=extra, temperature=values.pop("temperature", 0.0)
    )
    fields: Any = answer.choices[0].model_extra
    return fields["token_ids"], fields["accepted_draft_tokens"]


RESTRICTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "allowed": {"allowed_token_ids": [*PHRASE, 70, 71, 72]},
    "bad words": {"bad_words": ["a", "e", "the"], "logit_bias": {"41": 100}},
    "minimal length": {"ignore_eos": False, "stop_token_ids": [*range(1, 300, 5)], "min_tokens": 20},
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", sorted(RESTRICTIONS))
async def test_drafts_change_no_token_of_a_restricted_answer(
    client: openai.AsyncOpenAI, name: str, temperature: float
) -> None:
    values = {**RESTRICTIONS[name], "temperature": temperature}
    plain, none = await tokens(client, drafts=False, **values)
    drafted, _ = await tokens(client, drafts=True, **values)
    assert none == 0
    assert drafted == plain
    if name == "allowed":
        assert set(plain) <= set(RESTRICTIONS[name]["allowed_token_ids"])
    if name == "minimal length":
        assert 20 <= len(plain) < 32


async def test_drafts_are_accepted_in_a_restricted_answer(client: openai.AsyncOpenAI) -> None:
    drafted, accepted = await tokens(client, drafts=True, allowed_token_ids=[45, 46], bad_words=["zz"])
    assert set(drafted) <= {45, 46}
    assert accepted > 0


async def test_an_echo_scores_the_prompt_as_the_model_does(client: openai.AsyncOpenAI, directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = PROMPT * 2  # several steps long
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0].double().log_softmax(dim=-1)
    for _ in range(2):  # the second time, the prompt is in the prefix cache
        answer = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=1, logprobs=1, echo=True, temperature=0.0
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        found: Any = logprobs.token_logprobs
        assert found[0] is None
        assert len(found) == len(prompt) + 1
        own = [float(expected[position, token]) for position, token in enumerate(prompt[1:])]
        assert found[1:-1] == pytest.approx(own, abs=1e-4)
        greedy: Any = logprobs.top_logprobs
        is_greedy = [max(top.values()) == value for top, value in zip(greedy[1:-1], found[1:-1], strict=True)]
        best = expected.argmax(dim=-1).tolist()
        assert is_greedy == [best[position] == token for position, token in enumerate(prompt[1:])]
