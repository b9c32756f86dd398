"""What is shared, let go, evicted or brought back changes no token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedConfig

from cluster.core.config import KvSection, ModelSection, TargetSection
from cluster.core.ids import SequenceId
from cluster.core.kv import KvGroup, KvLayout
from cluster.core.request import SamplingParameters, SequenceStart
from cluster.core.tree import EMPTY_TREE, TokenTree
from cluster.core.verification import OpenRow, RowFaultCode, StepBatch, VerifyRow
from tests.support import tiny
from workers.forward.loaded_model import LoadedModel
from workers.kv import block_table
from workers.kv.groups import group_layers
from workers.kv.load_cost import Medium
from workers.kv.pool import KvPool
from workers.kv.tiers import Tiers
from workers.model.loading import load_model
from workers.verify.build import build_engine
from workers.verify.decider import LocalDecider
from workers.verify.engine import TargetEngine

GREEDY = SamplingParameters(temperature=0.0)
SAMPLED = SamplingParameters(temperature=0.9, top_p=0.95, seed=7)
WINDOW = 12
BLOCK = 4
Guess = Callable[[Sequence[int]], TokenTree]


def gemma3(**changes: object) -> PreTrainedConfig:
    """Five layers, of which the third sees everything and the others `WINDOW` tokens."""
    shape = {"hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3}
    kinds = ["full_attention" if layer == 2 else "sliding_attention" for layer in range(5)]
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    size = {"vocab_size": tiny.VOCABULARY, "intermediate_size": 80, "head_dim": 8, "max_position_embeddings": 256}
    window = {"sliding_window": WINDOW, "layer_types": kinds, "query_pre_attn_scalar": 8}
    return Gemma3TextConfig(**(shape | ends | size | window | changes))


@dataclass(frozen=True)
class Case:
    directory: Path

    def model(self) -> LoadedModel:
        """One for each engine: a model is bound to its pool."""
        return load_model(ModelSection(path=str(self.directory), device="cpu"))

    def engine(self, blocks: int = 300, **changes: object) -> TargetEngine:
        return self.engine_and_pool(blocks, **changes)[0]

    def engine_and_pool(self, blocks: int, **changes: object) -> tuple[TargetEngine, KvPool]:
        """To them a token is so dear to compute (a second) that whatever is stored is brought back."""
        model = self.model()
        pool = KvPool(model.kv_spec, KvSection(block_size=BLOCK, **changes), blocks)
        pool.record_compute(1 << 40, 1 << 40, float(1 << 40), awaited=True)
        return TargetEngine(model, pool, LocalDecider()), pool

    def layout(self) -> KvLayout:
        return group_layers(self.model().kv_spec, KvSection(block_size=BLOCK)).layout

    def reference(self, prompt: Sequence[int], count: int) -> list[int]:
        """Greedy tokens by `transformers` alone."""
        model = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32)
        tokens = torch.tensor([list(prompt)])
        output = model.generate(
            tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, use_cache=False
        )
        return output[0, len(prompt) :].tolist()


def load(directory: Path, config: PreTrainedConfig) -> Case:
    tiny.save(directory, config, sharpness=4.0)
    return Case(directory)


CONFIGURATIONS = {
    "full": tiny.llama,
    "window": lambda: tiny.mistral(sliding_window=WINDOW),
    "hybrid": gemma3,
}


@pytest.fixture(scope="module", params=sorted(CONFIGURATIONS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return load(tmp_path_factory.mktemp(request.param), CONFIGURATIONS[request.param]())


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return load(tmp_path_factory.mktemp("full"), tiny.llama())


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return load(tmp_path_factory.mktemp("hybrid"), gemma3())


def some_tokens(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, tiny.VOCABULARY) for _ in range(count)]


def no_guess(_: Sequence[int]) -> TokenTree:
    return EMPTY_TREE


def guesses(answer: Sequence[int], seed: int = 0) -> Guess:
    """Branching trees, of which one branch is often right for a while."""
    draw = random.Random(seed)

    def guess(tokens: Sequence[int]) -> TokenTree:
        true = [answer[position] for position in range(len(tokens), min(len(tokens) + 6, len(answer)))]
        right = true[: draw.randrange(7)]
        wrong = [[*right[: draw.randrange(3)], *some_tokens(2, draw.randrange(999))] for _ in range(2)]
        candidates = [right, *wrong]
        draw.shuffle(candidates)
        return TokenTree.from_candidates([candidate for candidate in candidates if candidate], max_nodes=12)

    return guess


@dataclass
class Conversation:
    """One sequence on an engine."""

    engine: TargetEngine
    tokens: list[int]
    start: SequenceStart
    name: SequenceId
    chunk: int = 1000

    def open(self, parent: str | None = None) -> int:
        """Tokens that were stored already."""
        row = OpenRow(self.name, tuple(self.tokens), self.start, None if parent is None else SequenceId(parent))
        self.stored = self.engine.open([row]).stored_lens[0]
        return self.stored

    def decode(self, count: int, guess: Guess = no_guess) -> list[int]:
        begun = len(self.tokens)
        while len(self.tokens) < begun + count:
            self.step(guess)
        del self.tokens[begun + count :]  # a longer answer is a prefix of the same text
        return self.tokens[begun:]

    def step(self, guess: Guess = no_guess) -> None:
        end = min(self.stored + self.chunk, len(self.tokens))
        decide = end == len(self.tokens)
        tree = guess(self.tokens) if decide else EMPTY_TREE
        row = VerifyRow(self.name, end, tuple(self.tokens[self.stored : end]), tree, decide)
        verdict = self.engine.step(StepBatch((row,))).verdicts[0]
        assert verdict.fault is None, verdict.fault
        self.tokens.extend(verdict.tokens)
        self.stored = end + verdict.accepted


def talk(
    engine: TargetEngine, prompt: Sequence[int], name: str = "a", salt: str = "", sampling: SamplingParameters = GREEDY
) -> Conversation:
    return Conversation(engine, list(prompt), SequenceStart(len(prompt), sampling, salt), SequenceId(name))


def answer(
    engine: TargetEngine, prompt: Sequence[int], count: int, salt: str = "", guess: Guess = no_guess
) -> list[int]:
    conversation = talk(engine, prompt, salt=salt)
    conversation.open()
    tokens = conversation.decode(count, guess)
    engine.release([conversation.name])
    return tokens


# --- windows ----------------------------------------------------------------------------------


def test_past_the_window_the_text_is_the_models_own_with_and_without_trees(case: Case) -> None:
    prompt = some_tokens(19)
    expected = case.reference(prompt, 60)
    assert answer(case.engine(), prompt, 60) == expected
    for seed in range(3):
        assert answer(case.engine(), prompt, 60, guess=guesses([*prompt, *expected], seed)) == expected


@pytest.mark.parametrize("chunk", [1, 5, 33])
def test_a_prompt_longer_than_the_window_in_chunks(case: Case, chunk: int) -> None:
    prompt = some_tokens(70, seed=1)
    conversation = replace(talk(case.engine(), prompt), chunk=chunk)
    conversation.open()
    assert conversation.decode(5) == case.reference(prompt, 5)


def test_a_window_holds_what_its_layout_says_and_no_more(hybrid: Case) -> None:
    engine = hybrid.engine()
    layout = engine.info().layout
    assert layout.groups == (KvGroup(4, window=WINDOW), KvGroup(1))
    conversation = talk(engine, some_tokens(50))
    conversation.open()
    for _ in range(30):
        conversation.step(guesses([*conversation.tokens, 5, 5]))
        kv = engine.info().kv
        assert kv.blocks_total - kv.blocks_free == layout.held(conversation.stored)
    assert layout.held(80) < 80 // BLOCK * layout.tables // 2
    engine.release([conversation.name])
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total


def test_a_pool_too_small_for_the_whole_context_carries_a_window_to_its_end(tmp_path: Path) -> None:
    case = load(tmp_path, tiny.mistral(sliding_window=WINDOW))
    prompt = some_tokens(20, seed=2)
    assert answer(case.engine(blocks=7), prompt, 100) == case.reference(prompt, 100)


def test_layers_of_unlike_depth_share_one_table_and_keep_their_masks(tmp_path: Path) -> None:
    kinds = ["full_attention"] + ["sliding_attention"] * 66
    small = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 8}
    case = load(tmp_path, gemma3(num_hidden_layers=67, layer_types=kinds, **small))
    engine = case.engine()
    assert engine.info().layout.groups == (KvGroup(),)
    prompt = some_tokens(40, seed=3)
    assert answer(engine, prompt, 5) == case.reference(prompt, 5)


# --- a window that the model was not made for -------------------------------------------------


def lossy_reference(case: Case, prompt: Sequence[int], count: int, window: int, sinks: int) -> list[int]:
    """Greedy, each token over the whole sequence with the mask written out."""
    model = AutoModelForCausalLM.from_pretrained(case.directory, dtype=torch.float32, attn_implementation="eager")
    tokens = list(prompt)
    for _ in range(count):
        query, key = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))
        seen = (key <= query) & ((query - key < window) | (key < sinks))
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), attention_mask=mask[None, None]).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("sinks", [0, 2, 5])
def test_a_configured_window_is_lossy_and_exactly_what_its_mask_says(full: Case, sinks: int) -> None:
    prompt = some_tokens(30, seed=4)
    engine = full.engine(blocks=12, window=16, sinks=sinks)
    expected = lossy_reference(full, prompt, 40, 16, sinks)
    assert expected != full.reference(prompt, 40)
    assert answer(engine, prompt, 40) == expected
    assert answer(engine, prompt, 40, guess=guesses([*prompt, *expected])) == expected
    assert engine.info().layout.groups == (KvGroup(1, window=16, sinks=sinks),)


# --- the prefix cache -------------------------------------------------------------------------


def test_a_repeated_prompt_is_stored_already_and_its_answer_the_same(case: Case) -> None:
    prompt = some_tokens(37)
    engine = case.engine()
    fresh = answer(engine, prompt, 40)
    again = talk(engine, prompt)
    assert again.open() == 36
    assert again.decode(40, guesses([*prompt, *fresh])) == fresh
    engine.release([again.name])
    assert engine.info().kv.blocks_free == engine.info().kv.blocks_total


def test_a_turn_later_the_whole_conversation_is_a_hit(case: Case) -> None:
    prompt = some_tokens(21)
    engine = case.engine()
    fresh = answer(engine, prompt, 30, guess=guesses(some_tokens(60)))
    following = [*prompt, *fresh, *some_tokens(9, seed=8)]
    turn = talk(engine, following, "b")
    assert turn.open() == 48
    assert turn.decode(20) == answer(case.engine(prefix_cache=False), following, 20)


def test_prompts_share_their_common_beginning_while_both_run(case: Case) -> None:
    common = some_tokens(18)
    engine = case.engine()
    plain = case.engine(prefix_cache=False)
    talks = []
    for place in range(3):
        conversation = talk(engine, [*common, *some_tokens(9, seed=20 + place)], f"s{place}")
        assert conversation.open() == (16 if place else 0)
        conversation.step()
        talks.append(conversation)
    for conversation in talks:
        prompt = conversation.tokens[:27]
        conversation.decode(20)
        assert conversation.tokens[27:47] == answer(plain, prompt, 20)


def test_tenants_do_not_share(case: Case) -> None:
    prompt = some_tokens(37)
    engine = case.engine()
    fresh = answer(engine, prompt, 10, salt="one")
    other = talk(engine, prompt, "b", salt="two")
    assert other.open() == 0
    assert other.decode(10) == fresh
    own = talk(engine, prompt, "c", salt="one")
    assert own.open() == 36
    child = talk(engine, prompt, "d", salt="three")
    assert child.open(parent="c") == 0


def test_without_the_cache_nothing_is_shared_but_what_a_parent_holds(case: Case) -> None:
    prompt = some_tokens(37)
    engine = case.engine(prefix_cache=False)
    answer(engine, prompt, 3)
    first = talk(engine, prompt)
    assert first.open() == 0
    first.step()
    assert talk(engine, prompt, "b").open(parent="a") == 36
    assert talk(engine, prompt, "c").open() == 0


def test_a_start_from_nothing_looks_nothing_up(full: Case) -> None:
    prompt = some_tokens(20)
    engine = full.engine()
    fresh = answer(engine, prompt, 1)
    row = VerifyRow(SequenceId("a"), 20, tuple(prompt), start=SequenceStart(20, GREEDY))
    assert list(engine.step(StepBatch((row,))).verdicts[0].tokens) == fresh


@pytest.mark.parametrize("moved_out", [False, True], ids=["dropped", "moved out"])
def test_many_more_prompts_than_memory_are_all_answered_right(case: Case, moved_out: bool) -> None:
    engine = case.engine(blocks=26 * case.layout().tables, host_bytes=(1 << 20) if moved_out else 0)
    plain = case.engine(prefix_cache=False)
    prompts = [some_tokens(41, seed=seed % 6) for seed in range(18)]
    expected = {seed: answer(plain, prompts[seed], 12) for seed in range(6)}
    hits = 0
    for index, prompt in enumerate(prompts):
        conversation = talk(engine, prompt, f"s{index}", sampling=GREEDY)
        hits += conversation.open() > 0
        assert conversation.decode(12, guesses([*prompt, *expected[index % 6]], index)) == expected[index % 6]
        engine.release([conversation.name])
        assert engine.info().kv.blocks_free == engine.info().kv.blocks_total
    assert hits == (12 if moved_out else 0)  # in turn, six prompts push each other out of the pool before they return
    engine.close()


def tiers_of(pool: KvPool) -> Tiers:
    assert pool.tiers is not None
    return pool.tiers


@pytest.mark.parametrize("cheaper", ["loading", "computing"])
def test_a_preempted_sequence_goes_on_where_it_was_or_is_computed_whichever_is_cheaper(
    case: Case, cheaper: str
) -> None:
    prompt = some_tokens(22)
    expected = answer(case.engine(), prompt, 60)
    engine, pool = case.engine_and_pool(24 * case.layout().tables, host_bytes=1 << 20)
    conversation = talk(engine, prompt)
    conversation.open()
    conversation.decode(25)
    engine.release([conversation.name])
    for seed in (3, 4):
        answer(engine, some_tokens(90, seed), 2)  # takes nearly every block
    if cheaper == "computing":
        tiers_of(pool).costs.record_load(Medium.HOST, 1 << 20, 1e9)
    assert conversation.open() == (44 if cheaper == "loading" else 0)
    assert (tiers_of(pool).host.loaded > 0) == (cheaper == "loading")
    conversation.decode(35)
    assert conversation.tokens[22:] == expected
    engine.close()


def test_the_price_of_computing_is_that_of_the_steps(full: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[tuple[int, int]] = []
    engine, pool = full.engine_and_pool(300, host_bytes=1 << 20)
    costs = tiers_of(pool).costs
    monkeypatch.setattr(
        costs, "record_compute", lambda tokens, prompt_tokens, seconds, awaited: noted.append((tokens, prompt_tokens))
    )
    conversation = replace(talk(engine, some_tokens(50)), chunk=40)
    conversation.open()
    for _ in range(3):
        conversation.step(lambda _: TokenTree.chain([5, 6]))
    assert noted == [(40, 40), (12, 10), (3, 0)]
    engine.close()


def test_room_for_what_comes_back_is_not_made_at_its_own_cost(full: Case) -> None:
    block_bytes = BLOCK * 2 * 2 * 3 * 8 * 4
    engine, pool = full.engine_and_pool(12, host_bytes=24 * block_bytes)
    first, *others = [some_tokens(41, seed=seed) for seed in range(3)]
    for prompt in (first, *others):
        answer(engine, prompt, 1)  # each pushes the one before it out of the pool
    conversation = talk(engine, first)
    assert conversation.open() == 40  # it was the first to go from the host, had it not been asked for
    assert tiers_of(pool).host.dropped > 0
    engine.close()


def test_what_does_not_come_back_is_computed(full: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = some_tokens(41)
    engine, pool = full.engine_and_pool(26, host_bytes=1 << 20)
    expected = answer(engine, prompt, 12)
    answer(engine, some_tokens(95, seed=1), 9)  # takes every block
    monkeypatch.setattr(tiers_of(pool), "load", lambda key, parts: False)
    conversation = talk(engine, prompt)
    assert conversation.open() == 0
    assert conversation.decode(12) == expected
    engine.release([conversation.name])
    assert pool.blocks_free == 26
    engine.close()


def test_a_search_is_made_anew_when_what_it_made_room_for_did_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a window the shorter beginning that is at hand shares nothing with the longer one: it may have given way."""
    engine, pool = load(tmp_path, tiny.mistral(sliding_window=WINDOW)).engine_and_pool(9, host_bytes=1 << 20)
    monkeypatch.setattr(tiers_of(pool), "load", lambda key, parts: False)
    texts = [some_tokens(80, seed) for seed in range(2)]
    draw = random.Random(4)
    for turn in range(30):
        text = draw.choice(texts)
        conversation = replace(talk(engine, text[: draw.randrange(5, 80)], f"s{turn}"), chunk=8)
        conversation.open()
        while conversation.stored < len(conversation.tokens) - 1:
            conversation.step()
        engine.release([conversation.name])
        assert pool.blocks_free == 9
    engine.close()


def test_an_engine_that_fails_while_it_warms_up_leaves_nothing_on_disk(
    full: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(engine: TargetEngine) -> None:
        assert list(tmp_path.iterdir())
        raise ZeroDivisionError

    monkeypatch.setattr(TargetEngine, "warm_up", fail)
    kv = KvSection(pool_bytes=1 << 20, disk_directory=str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        build_engine(TargetSection(path=str(full.directory), device="cpu", kv=kv))
    assert not list(tmp_path.iterdir())


def test_looking_for_a_prompt_everywhere_hashes_it_once(full: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    engine = full.engine(26, host_bytes=1 << 20)
    prompt = some_tokens(41)
    answer(engine, prompt, 1)
    answer(engine, some_tokens(95, seed=1), 9)  # takes every block
    key_of = block_table.next_key
    monkeypatch.setattr(block_table, "next_key", lambda before, tokens: (hashed.append(1), key_of(before, tokens))[1])
    assert talk(engine, prompt).open() == 40
    assert len(hashed) == 10
    engine.close()


@pytest.mark.parametrize("lost", [0.0, 0.2], ids=["all comes back", "some is lost"])
def test_random_lives_share_forget_and_leak_nothing(case: Case, lost: float, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = case.layout()
    engine, pool = case.engine_and_pool(30 * layout.tables, host_bytes=1 << 18)
    chance, load = random.Random(6), tiers_of(pool).load
    monkeypatch.setattr(tiers_of(pool), "load", lambda key, parts: chance.random() >= lost and load(key, parts))
    plain = case.engine(prefix_cache=False)
    draw = random.Random(5)
    texts = [[*some_tokens(draw.randrange(1, 40), seed=seed)] for seed in range(4)]
    texts = [[*text, *answer(plain, text, 40)] for text in texts]
    held: dict[str, Conversation] = {}
    for turn in range(150):
        action = draw.random()
        if action < 0.35 and len(held) < 6:
            text = draw.choice(texts)
            parent = draw.choice([None, *held])
            conversation = talk(engine, text[: draw.randrange(max(1, len(text) - 40), len(text))], f"s{turn}")
            conversation.open(parent)
            held[f"s{turn}"] = conversation
        elif held and action < 0.85:
            name = draw.choice(sorted(held))
            conversation = held[name]
            text = next(text for text in texts if text[: len(conversation.tokens)] == conversation.tokens)
            if not advance(conversation, guesses(text, turn)) or len(conversation.tokens) > len(text):
                engine.release([conversation.name])
                del held[name]
            elif conversation.tokens != text[: len(conversation.tokens)]:
                pytest.fail(f"turn {turn}: another text")
        elif held:
            engine.release([held.pop(draw.choice(sorted(held))).name])
    kv = engine.release_all()
    assert kv.blocks_free == kv.blocks_total
    engine.close()


def advance(conversation: Conversation, guess: Guess) -> bool:
    """One step; `False` where there was no memory for it."""
    tokens, stored = conversation.tokens, conversation.stored
    row = VerifyRow(conversation.name, len(tokens), tuple(tokens[stored:]), guess(tokens))
    verdict = conversation.engine.step(StepBatch((row,))).verdicts[0]
    if verdict.fault is not None:
        assert verdict.fault.code is RowFaultCode.KV_EXHAUSTED
        return False
    conversation.stored = len(tokens) + verdict.accepted
    tokens.extend(verdict.tokens)
    return True
