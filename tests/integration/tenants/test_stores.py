"""What outlives a request, by name, and that clients with different keys see nothing of each other in it.

A cluster answers requests of every kind. What it holds afterwards and did not hold before must be named here: with a
trial of two keys for what is kept of texts, or with the reason why nobody can read anything there.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster.core.config.sections import LimitsSection
from cluster.core.ids import scoped_salt
from cluster.ingress.http import create_app
from cluster.ingress.router.choice import prefix_hashes
from pilotfish.v1 import common_pb2, generation_pb2
from tests.integration.tenants.retained import Snapshot
from tests.integration.tenants.two_keys import ALICE, BOB, TwoKeys, configuration, settled, two_keys
from tests.support.models import tiny_tokenizer
from tests.support.translation.tiny_marian import FRENCH, save_translator
from tests.unit.draft.contract.methods import CASES, Directories, MethodCase, make_directories
from workers.draft.common.learning import salt_key
from workers.draft.common.modules.context_store import SegmentKeys
from workers.draft.common.modules.learned_modules import LearnedPasses
from workers.draft.registry import METHODS
from workers.kv.sources import source_salt
from workers.serve.configuration import load_configuration

pytestmark = pytest.mark.slow

SECRET = (10, 11, 12, 201, 202, 203, 204, 205)
"""What one client has in its text."""
AROUND = tuple(range(60, 92))
PROBE = (50, 51, 11)
"""How another client asks what follows in it. Its answer goes on with 12, and drafts come after an answer's token."""


async def cached(clients: TwoKeys, key: str, prompt: Any) -> int:
    usage = (await clients.completed(key, prompt, max_tokens=1))["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


async def finds_blocks(clients: TwoKeys) -> bool:
    """Whether a prompt of one client is found by another one, while its own client finds it."""
    prompt = [3 + number % 250 for number in range(200)]
    await cached(clients, ALICE, prompt)
    found = await cached(clients, BOB, prompt)
    assert await cached(clients, ALICE, prompt) > 0
    return found > 0


async def finds_evicted_blocks(clients: TwoKeys) -> bool:
    """Whether one key finds the other's blocks after they moved to the host's memory and to the disk."""
    prompt = [250 - number for number in range(200)]
    await cached(clients, ALICE, prompt)
    await fill(clients, 60)
    found = await cached(clients, BOB, prompt)
    assert await cached(clients, ALICE, prompt) > 0
    return found > 0


async def fill(clients: TwoKeys, count: int, key: str = ALICE) -> None:
    """Send as many long prompts."""
    prompts = [[3 + (7 * number + place) % 293 for place in range(200)] for number in range(count)]
    await clients.completed(key, prompts, max_tokens=1)


async def drafts_the_text(clients: TwoKeys) -> bool:
    """Whether one client is drafted what another one has in its text, while its own client is."""

    async def drafted(key: str) -> bool:
        request = generation_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=PROBE),
            sampling=common_pb2.SamplingParameters(temperature=0.0, allowed_token_ids=[SECRET[2]]),
            stopping=generation_pb2.StoppingCriteria(max_tokens=4, ignore_eos=True),
            return_drafts=True,
        )
        responses = await clients.over_grpc(key, request)
        tokens = {token for one in responses for draft in one.delta.drafts for token in draft.token_ids}
        return bool(tokens & set(SECRET[3:]))

    await clients.completed(ALICE, [*AROUND, *SECRET, *SECRET])
    found = await drafted(BOB)
    await clients.completed(ALICE, [*AROUND, *SECRET, *SECRET])
    assert await drafted(ALICE)
    return found


async def continues_the_conversation(clients: TwoKeys) -> bool:
    """Whether one client goes on with a conversation of another one, while its own client does."""
    body = {"input": "hello", "max_output_tokens": 4}
    response = await clients.answered(ALICE, "/v1/responses", body)
    again = body | {"previous_response_id": response["id"]}
    found = await clients.send(BOB, "/v1/responses", again)
    assert (await clients.send(ALICE, "/v1/responses", again)).status_code == 200
    if found.status_code == 400:
        assert found.json()["error"]["param"] == "previous_response_id"
    return found.status_code == 200


async def resumes_the_answer(clients: TwoKeys) -> bool:
    """Whether one client's call takes the stored tokens of another one's answer, while its own client's does."""
    request = generation_pb2.GenerateRequest(
        text="hello",
        request_id="same",
        sampling=common_pb2.SamplingParameters(temperature=0.0, seed=1),
        stopping=generation_pb2.StoppingCriteria(max_tokens=6, ignore_eos=True),
    )

    async def resumed(key: str) -> int:
        again = generation_pb2.GenerateRequest()
        again.CopyFrom(request)
        again.resume.add(index=0, token_count=4)
        return int((await clients.over_grpc(key, again))[-1].finished.usage.resumed_tokens)

    await clients.over_grpc(ALICE, request)
    found = await resumed(BOB)
    assert await resumed(ALICE) == 4
    return found > 0


async def is_routed_by_the_prompt(clients: TwoKeys) -> bool:
    """Whether the ingress knows, for one client, where a prompt of another one went, while it does for its own."""
    await clients.completed(ALICE, "hello " * 20)
    asked = generation_pb2.GenerateRequest(text="hello " * 20)
    found = {}
    for name in ("alice", "bob"):
        asked.client = name
        found[name] = bool(clients.router._memory.matches(prefix_hashes(asked)))
    assert found["alice"]
    return found["bob"]


async def learns_from_the_text(_: TwoKeys) -> bool:
    """Whether weights that one client's texts have taught draft for another client, as they do for the first one."""
    alice, bob = (scoped_salt(name, "", shares_between_keys=False) for name in ("alice", "bob"))
    all_passes = [one for one in gc.get_objects() if isinstance(one, LearnedPasses)]
    assert all_passes
    found = False
    for passes in all_passes:
        passes.replace(salt_key(alice), passes.of(""))
        assert passes.of_salt(alice) is not passes.own
        found = found or passes.of_salt(bob) is not passes.own
    return found


async def finds_contexts(_: TwoKeys) -> bool:
    """Whether two clients have keys in common for what a module computed of the same text, as one client has."""
    keys = [SegmentKeys(scoped_salt(name, "", shares_between_keys=False)).of([1] * 32) for name in ("a", "a", "b")]
    assert keys[0] == keys[1]
    return bool(set(keys[0]) & set(keys[2]))


async def finds_sources(_: TwoKeys) -> bool:
    """Whether two clients have a salt in common for the same source of a translator, as one client has."""
    salts = [scoped_salt(name, "", shares_between_keys=False) for name in ("a", "a", "b")]
    for kind in ("blocks", "text"):
        one, same, other = (source_salt(salt, (1, 2, 3), kind) for salt in salts)
        assert one == same
        if one == other:
            return True
    return False


Trial = Callable[[TwoKeys], Awaitable[bool]]

STORES: dict[str, Trial] = {
    # the prefix cache: blocks by their keys, in the pool, on the host and on the disk
    "PrefixIndex._block_of": finds_blocks,
    "PrefixIndex._key_of": finds_blocks,
    "PrefixIndex._idle": finds_blocks,
    "KvPool.keys": finds_blocks,
    "KvPool.store": finds_blocks,
    "KvPool.values": finds_blocks,
    "StackCopies._stacks": finds_blocks,
    "PrefixStates._entries": finds_blocks,  # states of recurrent layers have the keys of the blocks that they follow
    # drafts from earlier texts
    "OutputStore._indexes": drafts_the_text,
    "OutputStore._outputs": drafts_the_text,
    "OccurrenceIndex._heads": drafts_the_text,
    "OccurrenceIndex._previous": drafts_the_text,
    "OccurrenceIndex._sizes": drafts_the_text,
    "OccurrenceIndex.tokens": drafts_the_text,
    "SuccessorTables._tables": drafts_the_text,
    "Successors._given": drafts_the_text,
    "Successors._rows": drafts_the_text,
    "ContextStore._segments": finds_contexts,
    # drafts that learn from texts: the texts, the weights and their versions
    "Learner._learned": learns_from_the_text,
    "Learner._trained": learns_from_the_text,
    "Learner.candidate": learns_from_the_text,
    "LearnedModules._learned": learns_from_the_text,
    "LearnedModels._learned": learns_from_the_text,
    "Reservoir._texts": learns_from_the_text,
    "Versions._served": learns_from_the_text,
    "_Texts._order": learns_from_the_text,
    "_Texts._parts": learns_from_the_text,
    # what clients come back for
    "Conversations._stored": continues_the_conversation,
    "RecentAnswers._stored": resumes_the_answer,
    "PrefixMemory._seen": is_routed_by_the_prompt,
}
"""What is kept of texts, and how two keys try to see each other in it."""
_TIERS = ("_HostTier._free", "_HostTier._memory", "_HostTier._slots")
STORES |= dict.fromkeys(_TIERS, finds_evicted_blocks)
STORES |= {"DiskTier._sizes": finds_evicted_blocks}

LAST = "the last step, call or record: it is replaced by the next one, which does not read it"
SCRATCH = "memory for one pass of the model, which the next one overwrites before it reads it"
RATES = "how often drafts are right, over all clients: it changes how many tokens are drafted, not which"
LOAD = "times and amounts of work, over all clients"
OWN = "a function of its key alone: it holds nothing of the request that asked first"
LEASE = "ids of sequences while a worker stores them: a lease that ends on a busy machine begins again"
WRITTEN = "where prompts of clients that agree are stored, and what went wrong: no request is answered from them"
UNREAD: dict[str, str] = {
    "GrpcDrafter._learned": LOAD,
    "Leases._leases": LEASE,
    "_Lease.sequence_ids": LEASE,
    "ReleaseQueue._task": LAST,
    "TargetBudgets.chosen": LAST,
    "TargetBudgets.requested": LAST,
    "PromptLog._file": WRITTEN,
    "PromptLog._warnings": WRITTEN,
    "Loop._idle.self": LAST,
    "Loop._run.timer": LAST,
    "Metrics._accepted_at": RATES,
    "Turns._queue": LOAD,
    "Turns._started": LOAD,
    "RoundTimer._clock": LAST,
    "Wakeup.wait.self": LAST,
    "GrammarChecker._results": OWN,
    "CompilerQueue._shares": LOAD,
    "CompilerQueue._work": LAST,
    "DraftsOnTarget._requested": LAST,
    "Proposer._record": LAST,
    "Tokenizer._bytes": OWN,
    "CoordinatorPool._watch": LAST,
    "CallInterceptor._reading": LAST,
    "CallInterceptor._requests.reading": LAST,
    "CallInterceptor._requests.request": LAST,
    "CallInterceptor._stream_stream.<locals>.call.answer": LAST,
    "Calibration._first_rates": RATES,
    "_RankCounts.hits": RATES,
    "_RankCounts.trials": RATES,
    "LookupAcceptance._hits": RATES,
    "LookupAcceptance._trials": RATES,
    "Reliability._hits": RATES,
    "Reliability._trials": RATES,
    "RankRates._rates": RATES,
    "NativeDecoder._scratch": SCRATCH,
    "PackedProduct._input": SCRATCH,
    "WindowLayers._scratch": SCRATCH,
    "WorkBuffers._scratch": SCRATCH,
    "ModelRunner._firsts": LAST,
    "ModelRunner._shapes": LAST,
    "ModelRunner.hidden": LAST,
    "BlockAllocator._free": "the numbers of free blocks, in the order of their release",
    "DiskTier._next.<locals>.<lambda>.self": LAST,
    "CostModel._pending": LOAD,
    "GrammarCompiler._compiled": OWN,
    "DraftServicer.Propose.call": LAST,
    "DraftServicer.Propose.proposals": LAST,
    "DraftServicer.Propose.request": LAST,
    "_Call.client": LAST,
    "_Call.ids": LAST,
    "_Call.proposals": LAST,
    "_Call.rows": LAST,
    "TargetServicer.Step.batch": LAST,
    "TargetServicer.Step.request": LAST,
    "TargetServicer.Step.result": LAST,
}
UNREAD |= {f"RequestRecord.{name}": LAST for name in ("answer_id", "client", "clock", "finish", "model", "traceparent")}
"""What else changes with requests, and why no client reads a text there."""
ROUTES: dict[str, Any] = {
    "post /v1/completions": {"prompt": "hello", "max_tokens": 2},
    "post /v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "post /v1/responses": {"input": "hello", "max_output_tokens": 16},
    "post /v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "model": "tiny"},
    "post /v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}], "model": "tiny"},
    "post /v1/verify": {"request": {"prompt": "hello", "max_tokens": 2}, "receipt": {"seed": 5}, "text": "x"},
    "post /tokenize": {"prompt": "hello"},
    "post /detokenize": {"tokens": [40, 41]},
    "get /v1/models": None,
    "get /v1/models/{name}": None,
    "get /health": None,
    "head /health": None,
    "get /ping": None,
    "post /ping": None,
    "get /ready": None,
    "get /metrics": None,
    "get /version": None,
    "get /load": None,
    "get /docs": None,
    "get /cluster": None,
}
"""A request to every route."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    made = make_directories(tmp_path_factory.mktemp("tenants"), "llama")
    tiny_tokenizer.byte_level(made.target)
    return made


async def use(clients: TwoKeys, first: int, *, constrains: bool) -> None:
    """Send requests of every kind, with texts that no other call has."""
    for route, body in ROUTES.items():
        method, path = route.split()
        response = await clients.send(ALICE, path.replace("{name}", "tiny"), body, method.upper())
        assert response.status_code == 200, (route, response.text)
    for number in range(first, first + 3):
        await clients.completed(ALICE, [3 + (7 * number + place) % 293 for place in range(60)], max_tokens=20)
        if constrains:
            grammar = {"ignore_eos": False, "structured_outputs": {"regex": f"a{number}"}, "allowed_token_ids": None}
            await clients.completed(ALICE, f"hello {number}", **grammar)


async def changed_by(act: Callable[[int], Awaitable[None]]) -> set[str]:
    """The attributes that requests change, whose texts have the given numbers.

    On a busy machine, something in the background may change between two looks, too: what has no name must change
    each of three times.
    """
    found: set[str] | None = None
    for first in (10, 20, 30):
        before = Snapshot()
        await act(first)
        await settled()
        changed = Snapshot().changed_since(before)
        found = changed if found is None else found & changed
        if not unnamed(found):
            break
    return found or set()


def unnamed(found: set[str]) -> list[str]:
    return sorted(found - STORES.keys() - UNREAD.keys())


@pytest.mark.parametrize("method", METHODS.names())
async def test_everything_that_outlives_a_request_is_named_here(
    directories: Directories, tmp_path: Path, method: str
) -> None:
    kv = {"host_bytes": 1 << 19, "disk_directory": str(tmp_path / "disk")} if method == "none" else {}
    is_lossless = CASES.get(method, MethodCase()).is_lossless
    settings = configuration(directories, method, **kv)
    if kv:
        changes = {"draft.prompt_log_directory": str(tmp_path / "log")}
        settings = load_configuration(settings.model_dump(mode="json"), changes)
    async with two_keys(settings) as clients:

        async def act(first: int) -> None:
            await use(clients, first, constrains=is_lossless)
            if kv:
                await fill(clients, 40 + first)

        await use(clients, 0, constrains=is_lossless)
        await settled()
        found = await changed_by(act)
    assert not unnamed(found), f"{method}: name them, with a trial of two keys or a reason: {unnamed(found)}"
    assert not kv or list((tmp_path / "log").iterdir())


@pytest.mark.parametrize("placement", ["target", "drafter"])
@pytest.mark.parametrize("method", ["heads", "eagle", "block", "model"])
async def test_everything_that_a_draft_that_learns_keeps_is_named_here(
    directories: Directories, method: str, placement: str
) -> None:
    values = configuration(directories, method).model_dump(mode="json")
    changes = {"draft.learn": "on", "draft.placement": placement}
    async with two_keys(load_configuration(values, changes)) as clients:
        await use(clients, 0, constrains=True)
        await settled()
        found = await changed_by(partial(use, clients, constrains=True))
    assert not unnamed(found), unnamed(found)
    assert {"Reservoir._texts", "_Texts._parts"} & found


def test_every_route_is_used() -> None:
    app = create_app(None, LimitsSection())  # type: ignore[arg-type]
    routes = {f"{method} {path}" for path, methods in app.openapi()["paths"].items() for method in methods}
    assert routes == ROUTES.keys()


async def test_two_keys_see_nothing_of_each_other(directories: Directories, tmp_path: Path) -> None:
    kv = {"host_bytes": 1 << 19, "disk_directory": str(tmp_path / "disk")}
    for method, trials in TRIALS.items():
        values = configuration(directories, method, **kv).model_dump(mode="json")
        learn = "on" if learns_from_the_text in trials else "off"
        async with two_keys(load_configuration(values, {"draft.learn": learn})) as clients:
            for trial in trials:
                assert not await trial(clients), (method, trial.__name__)


TRIALS: dict[str, list[Trial]] = {
    "none": [
        finds_blocks,
        finds_evicted_blocks,
        continues_the_conversation,
        resumes_the_answer,
        is_routed_by_the_prompt,
        finds_contexts,
        finds_sources,
    ],
    "suffix": [drafts_the_text],
    "recycling": [drafts_the_text],
    "heads": [learns_from_the_text],
    "eagle": [learns_from_the_text],
    "model": [learns_from_the_text],
}


def test_every_trial_is_run() -> None:
    assert set(STORES.values()) <= {trial for trials in TRIALS.values() for trial in trials}


async def test_keys_share_if_the_settings_say_so_and_only_what_they_say(
    directories: Directories, tmp_path: Path
) -> None:
    shared = {"none": [finds_blocks, finds_evicted_blocks], "suffix": [drafts_the_text], "recycling": [drafts_the_text]}
    private = {"none": [continues_the_conversation, resumes_the_answer]}
    kv = {"host_bytes": 1 << 19, "disk_directory": str(tmp_path / "disk")}
    for method, trials in shared.items():
        async with two_keys(configuration(directories, method, "on", **kv)) as clients:
            (card,) = (await clients.send(BOB, "/v1/models", method="GET")).json()["data"]
            assert card["shares_between_keys"] is True
            for trial in trials:
                assert await trial(clients), (method, trial.__name__)
            for trial in private.get(method, ()):
                assert not await trial(clients), (method, trial.__name__)


async def test_everything_that_outlives_a_request_to_a_translator_is_named_here(tmp_path: Path) -> None:
    translator = Directories(save_translator(tmp_path / "model", "marian"), tmp_path, tmp_path)
    async with two_keys(configuration(translator, "none")) as clients:
        await clients.answered(ALICE, "/v1/completions", {"prompt": FRENCH[0]})
        await settled()
        before = Snapshot()
        await clients.answered(ALICE, "/v1/completions", {"prompt": list(FRENCH[1:])})
        await settled()
        unnamed = Snapshot().changed_since(before) - STORES.keys() - UNREAD.keys()
    assert not unnamed, f"name them, with a trial of two keys or a reason: {sorted(unnamed)}"
