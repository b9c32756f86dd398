"""Work on texts beside the event loop: short texts do not wait for long ones, and what waits is bounded."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from cluster.core.errors import InvalidRequest, Overloaded
from cluster.generation.text.chat_messages import CalledTool, Message
from cluster.generation.text.chat_template import RENDER_SECONDS, ChatTemplate, TemplateOptions
from cluster.generation.text.prompts import ChatPrompt
from cluster.generation.text.tokenizer import LONG_CHARS, TextExecutor, Tokenizer
from tests.support.models.tiny_tokenizer import byte_level


async def test_short_texts_and_the_event_loop_do_not_wait_for_long_ones() -> None:
    texts, release = TextExecutor(), threading.Event()
    long = [asyncio.ensure_future(texts.run(LONG_CHARS, release.wait, 30.0)) for _ in range(4)]
    assert await texts.run(10, str.upper, "short") == "SHORT"
    assert not any(one.done() for one in long)
    release.set()
    assert await asyncio.gather(*long) == [True] * 4


async def test_errors_are_those_of_the_work() -> None:
    def refuse() -> None:
        raise InvalidRequest("messages", "x", "valid")

    with pytest.raises(InvalidRequest, match="messages"):
        await TextExecutor().run(1, refuse)


async def test_texts_beyond_the_bound_are_refused_until_others_have_ended() -> None:
    texts, release = TextExecutor(most_chars=LONG_CHARS + 10), threading.Event()
    first = asyncio.ensure_future(texts.run(LONG_CHARS, release.wait, 30.0))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await texts.run(11, str.upper, "refused")
    assert await texts.run(10, str.upper, "taken") == "TAKEN"
    release.set()
    assert await first
    assert await texts.run(LONG_CHARS * 2, str.upper, "alone") == "ALONE"


async def test_the_event_loop_turns_while_a_large_text_is_tokenized(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path))
    text = "hello the world, this is 1 text of many words. " * 40_000
    turns_of_others = 0
    work = asyncio.ensure_future(tokenizer.texts.run(len(text), tokenizer.encode, text))
    while not work.done():
        await asyncio.sleep(0.0005)
        turns_of_others += 1
    assert tokenizer.decode((await work)[:10_000]) == tokenizer.decode(tokenizer.encode(text[:50_000])[:10_000])
    # With Python's lock held, the loop would turn once before the work and once after it.
    assert turns_of_others >= 20


def test_a_template_that_computes_for_long_is_refused() -> None:
    source = "{% for message in messages %}{{ message.role }}: {{ message['content'] }}\n{% endfor %}"
    seconds = iter(range(1000))
    template = ChatTemplate(source, {}, clock=lambda: float(next(seconds)))
    assert template.render([Message("user", "hi")]) == "user: hi\n"
    with pytest.raises(InvalidRequest, match=f"it computes for more than {RENDER_SECONDS:g} s"):
        template.render([Message("user", "hi")] * 20)


def test_all_that_a_template_may_show_of_a_conversation_counts_as_its_text() -> None:
    message = Message("assistant", "a" * 20, tool_calls=(CalledTool("i" * 9, "swim", "b" * 30),), reasoning="c" * 10)
    options = TemplateOptions(tools=("d" * 5, "e" * 6), arguments="f" * 4)
    assert ChatPrompt((message, Message("user", "g" * 7)), options).chars == 95
