"""A cluster stores the chats of the client that agrees, as prompts of a distillation, and nothing of anybody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish.v1 import common_pb2, generation_pb2
from tests.integration.tenants.two_keys import ALICE, BOB, TwoKeys, configuration, two_keys
from tests.support.models import tiny_tokenizer
from tests.unit.draft.contract.methods import Directories, make_directories
from workers.distill.prompts import read_prompts, schedule
from workers.serve.configuration import load_configuration

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    made = make_directories(tmp_path_factory.mktemp("tenants"), "llama")
    tiny_tokenizer.byte_level(made.target)
    return made


async def talk(clients: TwoKeys, key: str, name: str) -> None:
    """A chat of two turns over every API, a text, tokens, and a chat that is not to be stored."""
    first = {"role": "user", "content": f"{name} says one"}
    turns = [first, {"role": "assistant", "content": "an answer"}, {"role": "user", "content": f"{name} says two"}]
    system = {"role": "system", "content": "Be brief."}
    await clients.answered(key, CHAT, {"messages": [system, first], "max_tokens": 2})
    await clients.answered(key, CHAT, {"messages": [system, *turns], "max_tokens": 2, "n": 2})
    await clients.answered(key, CHAT, {"messages": [first], "max_tokens": 2, "store": False})
    await clients.answered(key, "/v1/responses", {"input": f"{name} responds", "max_output_tokens": 16})
    body = {"messages": [{"role": "user", "content": f"{name} writes"}], "max_tokens": 2, "model": "tiny"}
    await clients.answered(key, "/v1/messages", body)
    await clients.completed(key, f"{name} completes")
    await clients.completed(key, [40, 41])
    message = generation_pb2.ChatMessage(role="user", content=f"{name} calls")
    request = generation_pb2.GenerateRequest(
        chat=generation_pb2.ChatInput(messages=[message]),
        sampling=common_pb2.SamplingParameters(temperature=0.0),
        stopping=generation_pb2.StoppingCriteria(max_tokens=2),
        client_allows_learning=True,
    )
    await clients.over_grpc(key, request)


async def test_only_chats_of_the_client_that_agrees_are_stored_and_a_distillation_reads_them(
    directories: Directories, tmp_path: Path
) -> None:
    values = configuration(directories, "none").model_dump(mode="json")
    settings = load_configuration(values, {"draft.prompt_log_directory": str(tmp_path / "log")})
    for _ in range(2):  # a restart begins another file
        async with two_keys(settings) as clients:
            await talk(clients, ALICE, "alice")
            await talk(clients, BOB, "bob")

    files = sorted((tmp_path / "log").iterdir())
    assert len(files) == 2
    for file in files:
        prompts = read_prompts(file)
        assert [(prompt.system, prompt.turns) for prompt in prompts] == [
            ("Be brief.", ("alice says one", "alice says two")),
            (None, ("alice responds",)),
            (None, ("alice writes",)),
            (None, ("alice calls",)),
        ]
        assert len(list(schedule([prompts], [0.0], 0, 7))) == len(prompts)
        text = file.read_text()
        assert not [word for word in (ALICE, BOB, "bob", "an answer", "completes") if word in text]
