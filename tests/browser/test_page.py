"""The page in Chromium, over a cluster with the packaged model."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Route

from cluster.ingress.access.api_keys import parse_keys
from cluster.ingress.access.key_ring import KeyRing
from cluster.ingress.endpoints.cluster_status import read_replicas
from cluster.ingress.endpoints.page import Page as PageSettings
from cluster.ingress.http import create_app
from tests.browser.conftest import forwarded
from tests.support.browser import opened
from tests.support.fakes.fake_engine import listening
from tests.support.fakes.http_app import LIMITS, HttpApi

PROMPT = "Proofread: the pilot fish swim ahead of the shark. it eat the leftovers of the sharks meals."
ANSWER_MS = 180_000
"""Longest time of an answer on a busy machine, in milliseconds."""
KEY = "alice-key-0123456789"


async def ask(page: Page, prompt: str, *, tokens: int = 64, seed: str = "7", temperature: str = "0") -> None:
    """Type a prompt and wait for the end of the answer."""
    is_folded = not await page.is_visible("#seed")
    if is_folded:  # on a phone
        await page.click("#options summary")
    await page.fill("#max-tokens", str(tokens))
    await page.fill("#seed", seed)
    await page.fill("#temperature", temperature)
    if is_folded:
        await page.click("#options summary")
    await page.fill("#prompt", prompt)
    before = await page.locator(".message.assistant .foot").count()
    await page.keyboard.press("Enter")
    await page.locator(".message.assistant .foot").nth(before).wait_for(timeout=ANSWER_MS)


async def last_text(page: Page) -> str:
    """The text of the last answer, as the model wrote it and not as Markdown shows it."""
    return await page.locator(".message.assistant .text").last.get_attribute("data-source") or ""


async def save(page: Page, directory: Path | None, name: str, *, full: bool = False) -> None:
    if directory is not None:
        await page.screenshot(path=directory / f"{name}.png", full_page=full)


async def test_chat_tree_and_figures(browser: Browser, url: str, screenshots: Path | None) -> None:
    async with opened(browser, url, width=1360, height=880) as page:
        await page.wait_for_selector("#method:not([hidden])")
        assert await page.inner_text("#method") == "drafts: suffix+recycling"
        await save(page, screenshots, "empty")
        await ask(page, PROMPT)
        figures = {
            await cell.get_attribute("data-figure"): await cell.inner_text()
            for cell in await page.locator("#meters dd").all()
        }
        assert float(figures["per-pass"] or 0) > 1
        assert int(figures["passes"] or 0) < int(figures["tokens"] or 0)
        drafted = await page.locator(".token.draft").count()
        assert drafted > 0
        # The pass with the most accepted tokens: its tree has them, the target's own, and the tokens are marked.
        counts: list[int] = await page.evaluate(
            "[...Array(Number(document.getElementById('pass').max))].map((_, index) =>"
            " document.querySelectorAll(`.token.draft[data-pass='${index + 1}']`).length)"
        )
        assert sum(counts) == drafted
        best = counts.index(max(counts)) + 1
        await page.evaluate(
            "number => { const range = document.getElementById('pass'); range.value = number;"
            " range.dispatchEvent(new Event('input')); }",
            best,
        )
        assert (await page.inner_text("#pass-number")).startswith(f"{best} of ")
        assert await page.locator("#tree .node.draft").count() == max(counts)
        assert await page.locator("#tree .node.target").count() == 1
        assert await page.locator(".token.chosen").count() == max(counts) + 1
        await save(page, screenshots, "chat")
        with_drafts = await last_text(page)
        await page.click("#new-chat")
        await page.uncheck("#speculation")
        await ask(page, PROMPT)
        assert await last_text(page) == with_drafts
        assert await page.locator(".token.draft").count() == 0


async def test_the_race_ends_equal(browser: Browser, url: str, screenshots: Path | None) -> None:
    async with opened(browser, url, width=1360, height=880) as page:
        await page.click("#tab-race")
        await page.fill("#race-tokens", "72")
        await page.click("#race-start")
        if screenshots is not None:
            await page.locator("#lane-drafts .token").nth(40).wait_for(timeout=ANSWER_MS)
            await save(page, screenshots, "race-running")
        await page.wait_for_selector("#race-result:not([hidden])", timeout=ANSWER_MS)
        result = await page.inner_text("#race-result")
        assert result.startswith("Equal: all ")
        said = re.search(
            r"all (\d+) tokens\. \d+ target steps in (\S+) s without drafts, \d+ target steps in (\S+) s with them: "
            r"\S+ times as (fast|slow)",
            result,
        )
        assert said is not None
        for name, seconds in (("plain", said[2]), ("drafts", said[3])):
            rate = float(await page.inner_text(f"#lane-{name} [data-figure='rate']"))
            assert rate == pytest.approx(int(said[1]) / float(seconds), rel=0.05)
        plain, drafts = [await page.inner_text(f"#lane-{name} .text") for name in ("plain", "drafts")]
        assert plain == drafts != ""
        assert await page.locator("#lane-drafts .token.draft").count() > 0
        assert await page.locator("#lane-plain .token.draft").count() == 0
        await save(page, screenshots, "race")


@pytest.mark.parametrize("temperature", ["0", "0.8"])
async def test_killing_the_drafter_changes_no_token(
    browser: Browser, url: str, temperature: str, screenshots: Path | None
) -> None:
    async with opened(browser, url) as page:
        await ask(page, PROMPT, tokens=80, temperature=temperature)
        undisturbed = await last_text(page)
        await page.click("#new-chat")
        await page.fill("#prompt", PROMPT)
        await page.keyboard.press("Enter")
        await page.locator(".token").nth(12).wait_for(state="attached", timeout=ANSWER_MS)
        await page.click("#kill")
        await page.wait_for_selector(".mark")
        await page.wait_for_selector(".message.assistant .foot", timeout=ANSWER_MS)
        await save(page, screenshots, f"killed-{temperature}")
        assert (await page.inner_text(".mark")) == "the drafter was killed here"
        assert await last_text(page) == undisturbed


MARKDOWN = [
    ("# Sea", False),
    ("\n\n- one **two", True),
    ("** `x<b>`\n- [site](https://sea.example) [bad](javascript:alert(1))\n\n", False),
    ("```py\nif a < b:\n    pass\n```\n\n<img src=x onerror=alert(1)>", True),
]


async def test_markdown_is_shown_safely_and_keeps_the_colours(browser: Browser, url: str) -> None:
    async with opened(browser, url) as page:
        shown = await page.evaluate(
            """async (parts) => {
              const { Markdown } = await import(new URL("page/markdown.js", document.baseURI));
              const place = document.createElement("div");
              document.body.append(place);
              const shown = new Markdown(place, () => "");
              parts.forEach(([text, drafted], index) => {
                shown.add({ number: index + 1, tokens: [{ text, drafted }] });
                shown.show();
              });
              const colours = (selector) => [...place.querySelectorAll(selector)].map((one) => one.textContent);
              return {
                headings: colours("h3"), items: colours("li"), strong: colours("strong"), code: colours("pre code"),
                links: [...place.querySelectorAll("a")].map((one) => one.getAttribute("href")),
                images: place.querySelectorAll("img, script, [onerror]").length,
                text: place.textContent, source: place.dataset.source,
                draft: colours(".draft").join("|"), passes: colours("[data-pass='2']").join("|"),
              };
            }""",
            MARKDOWN,
        )
    assert shown["source"] == "".join(text for text, _ in MARKDOWN)
    assert (shown["headings"], shown["strong"], shown["code"]) == (["Sea"], ["two"], ["if a < b:\n    pass"])
    assert shown["items"] == ["one two x<b>", "site bad"]
    assert shown["links"] == ["https://sea.example", None]
    assert shown["images"] == 0
    assert "<img src=x onerror=alert(1)>" in shown["text"]
    assert shown["passes"] == "one |two"
    assert shown["draft"].startswith("one |two|if a < b:")


async def test_a_label_stays_where_it_was_put_however_the_text_goes_on(browser: Browser, url: str) -> None:
    text = "A **b** c.\n\n- d\n- e\n\nf\n\n\ng"
    async with opened(browser, url) as page:
        lost = await page.evaluate(
            """async (text) => {
              const { Markdown } = await import(new URL("page/markdown.js", document.baseURI));
              const lost = [];
              for (let at = 0; at <= text.length; at++) {
                const shown = new Markdown(document.createElement("div"), () => "");
                for (let end = 0; end <= text.length; end++) {
                  if (end === at) shown.mark("here");
                  shown.add({ number: end + 1, tokens: [{ text: text.slice(end, end + 1), drafted: false }] });
                  shown.show();
                  const count = shown.place.querySelectorAll(".mark").length;
                  if (count !== (end >= at ? 1 : 0)) lost.push([at, end, count]);
                }
              }
              return lost;
            }""",
            text,
        )
    assert lost == []


async def test_escape_and_enter_stop_an_answer_and_say_so(browser: Browser, tmp_path: Path) -> None:
    api = HttpApi(tmp_path, "hello the world")
    api.engine.context = 400
    api.engine.hold_after = 2
    app = create_app(api.client, LIMITS, page=PageSettings(9000))
    async with listening(app) as url, opened(browser, f"{url}/") as page:
        for key in ("Escape", "Enter"):
            await page.click("#new-chat")
            await page.fill("#prompt", "hi")
            await page.keyboard.press("Enter")
            await page.locator(".message.assistant .token").nth(3).wait_for(state="attached")
            await page.fill("#prompt", "kept")
            await page.keyboard.press(key)
            await page.wait_for_selector("#send:not([hidden])")
            assert await page.inner_text(".message.assistant .mark") == "stopped"
            assert await page.input_value("#prompt") == "kept"
            await asyncio.wait_for(api.engine.freed.get(), 30)  # the server stopped as well


async def test_a_server_that_is_away_is_one_state_with_retry(browser: Browser, tmp_path: Path) -> None:
    api = HttpApi(tmp_path, "hello the world")
    api.engine.context = 400
    app = create_app(api.client, LIMITS, page=PageSettings(9000))
    async with (
        listening(app) as url,
        forwarded(url) as forwarder,
        opened(browser, forwarder.url, expects_errors=True) as page,
    ):
        await ask(page, "hi", tokens=30)
        undisturbed = await last_text(page)
        whole = api.engine.script
        api.engine.script = lambda request: whole(request)[sum(len(part.tokens) for part in request.resumed) :]
        await page.click("#new-chat")
        api.engine.hold_after = 2
        await page.fill("#prompt", "hi")
        await page.keyboard.press("Enter")
        await page.locator(".token").nth(3).wait_for(state="attached")
        await forwarder.cut()
        await page.wait_for_selector("#notice:not([hidden])")
        await asyncio.sleep(3)  # several attempts
        assert await page.locator("#notice-text").all_inner_texts() == [
            "The server does not answer. The answer goes on when it is back."
        ]
        assert await page.locator(".mark").count() == 0
        api.engine.hold_after = None
        await forwarder.open()
        await page.click("#notice-actions >> text=Try now")
        await page.wait_for_selector(".message.assistant .foot")
        assert await last_text(page) == undisturbed
        assert await page.is_hidden("#notice")
        await forwarder.cut()
        await page.fill("#prompt", "hi")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#notice:not([hidden])")
        assert await page.inner_text("#notice-text") == "The server does not answer."
        await forwarder.open()
        await page.click("#notice-actions >> text=Ask again")
        await page.locator(".message.assistant .foot").nth(1).wait_for()


async def test_an_answer_is_verified_and_replayed_from_its_receipt(
    browser: Browser, url: str, screenshots: Path | None
) -> None:
    async with opened(browser, url, width=1360, height=880) as page:
        await ask(page, "Name three rivers.", tokens=24, seed="18446744073709551610", temperature="0.9")
        text = await last_text(page)
        await page.click(".foot >> text=Receipt")
        bundle: dict[str, Any] = json.loads(await page.input_value("#bundle"))
        assert bundle["text"] == text
        assert bundle["receipt"]["seed"] == 18446744073709551610
        await page.click("#verify")
        await page.wait_for_selector("#verdict.good", timeout=ANSWER_MS)
        await save(page, screenshots, "receipt")
        await page.fill("#bundle", json.dumps(bundle | {"text": text.replace(" ", "  ", 1)}))
        await page.click("#verify")
        await page.wait_for_selector("#verdict.bad", timeout=ANSWER_MS)
        await page.fill("#bundle", json.dumps(bundle))
        await page.click("#replay")
        await page.wait_for_selector(".message .result.good", timeout=ANSWER_MS)
        assert await last_text(page) == text


async def test_the_code_asks_the_same(browser: Browser, url: str) -> None:
    async with opened(browser, url) as page:
        await ask(page, "What's a 'shark'?", tokens=12)
        for language, word in (("curl", "curl -N "), ("python", "from openai"), ("grpcurl", "grpcurl -plaintext")):
            await page.click(f"#tab-{language}")
            code = await page.inner_text("#code")
            assert code.startswith(word)
            assert "shark" in code
        await page.click("#tab-curl")
        command = await page.inner_text("#code")
        process = await asyncio.create_subprocess_shell(
            command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        output, _ = await process.communicate()
        events = [json.loads(line[6:]) for line in output.decode().splitlines() if line.startswith("data: {")]
        text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        assert text == await last_text(page)


async def test_everything_works_from_the_keyboard(browser: Browser, url: str) -> None:
    async with opened(browser, url) as page:
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.id") == "tab-chat"
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert await page.evaluate(outline) == "solid"
        for name in ("race", "receipt", "cluster", "chat"):
            await page.keyboard.press("ArrowRight")
            assert await page.evaluate("document.activeElement.id") == f"tab-{name}"
            assert await page.is_visible(f"#view-{name}")
        seen: set[str] = set()
        for _ in range(40):
            await page.keyboard.press("Tab")
            seen.add(await page.evaluate("document.activeElement.id || document.activeElement.className"))
        assert {"prompt", "speculation", "temperature", "seed", "send", "kill", "tree", "tab-curl", "copy-code"} <= seen
        unnamed: list[str] = await page.evaluate(
            "[...document.querySelectorAll('button, input, textarea, [role]')].filter(one => !one.labels?.length"
            " && !one.getAttribute('aria-label') && !one.getAttribute('aria-labelledby')"
            " && !one.textContent.trim() && !['status', 'alert'].includes(one.role)).map(one => one.outerHTML)"
        )
        assert unnamed == []


async def test_colours_and_widths(browser: Browser, url: str, screenshots: Path | None) -> None:
    async with opened(browser, url, dark=True, width=1360, height=880) as page:
        dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        await ask(page, PROMPT)
        await page.locator("#strip .bar").nth(3).click()
        await save(page, screenshots, "dark")
        await page.click("#theme")
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
        await page.click("#theme")
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
        await page.click("#tab-cluster")
        await page.wait_for_selector(".replica")
        assert await page.locator("#topology .box.target").count() == 1
        assert await page.locator("#topology .box.drafter").count() == 1
        assert await page.locator("#topology .alive").count() == 1
        assert "tokens per second" in (await page.locator(".replica .line text").all_text_contents())
        await asyncio.sleep(2)
        await save(page, screenshots, "cluster-dark")
        await page.click("#theme")  # back to the system's colours
        await page.click("#theme")
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
        await save(page, screenshots, "cluster")
    async with opened(browser, url, width=390, height=844) as page:
        await ask(page, PROMPT)
        for name in ("chat", "race", "receipt", "cluster"):
            await page.click(f"#tab-{name}")
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
            if name == "chat":
                composer, side = (
                    await page.locator("#composer").bounding_box(),
                    await page.locator(".side").bounding_box(),
                )
                assert composer is not None
                assert side is not None
                assert composer["y"] + composer["height"] <= side["y"]
                assert composer["height"] <= 844 / 8
            await save(page, screenshots, f"phone-{name}", full=True)


@pytest.mark.parametrize(
    ("states", "shown", "is_on_target"),
    [
        ({}, "on the target", True),
        ({"available": 0, "failed": 0}, "0", False),
        ({"available": 2, "failed": 1}, "2 of 3", False),
    ],
    ids=["the target drafts", "nothing drafts", "drafters"],
)
async def test_the_cluster_says_who_drafts(
    browser: Browser, tmp_path: Path, states: dict[str, int], shown: str, is_on_target: bool
) -> None:
    exposition = "".join(f'pilotfish:drafters{{model_name="m",state="{name}"}} {states[name]}\n' for name in states)
    (replica,) = read_replicas(f'vllm:num_requests_running{{model_name="m"}} 1\n{exposition}')
    app = create_app(HttpApi(tmp_path).client, LIMITS, page=PageSettings(9000))
    async with listening(app) as url, opened(browser, f"{url}/") as page:
        await page.route("**/cluster", lambda route: route.fulfill(json={"replicas": [replica]}))
        await page.click("#tab-cluster")
        await page.wait_for_selector(".replica")
        assert await page.locator(".replica .meters div", has_text="drafters").locator("dd").inner_text() == shown
        assert ("drafts on the target" in await page.inner_html("#topology")) is is_on_target


async def test_tokens_per_step_over_time_are_shown_of_a_draft_that_learns_alone(
    browser: Browser, tmp_path: Path
) -> None:
    replicas = read_replicas(
        "".join(
            f'vllm:num_requests_running{{model_name="m",replica="{name}"}} 1\n'
            f'pilotfish:draft_learned_texts{{model_name="m",replica="{name}"}} {texts}\n'
            for name, texts in (("learns", 40), ("stays", 0))
        )
    )
    app = create_app(HttpApi(tmp_path).client, LIMITS, page=PageSettings(9000))

    async def decided(route: Route) -> None:
        for replica in replicas:
            replica["verdicts_total"] += 10
            replica["committed_tokens_total"] += 25
        await route.fulfill(json={"replicas": replicas})

    async with listening(app) as url, opened(browser, f"{url}/") as page:
        await page.route("**/cluster", decided)
        await page.click("#tab-cluster")
        await page.wait_for_selector("svg[aria-label^='Tokens per step over the last 60 s, at most 2.50']")
        assert await page.locator("svg[aria-label^='Tokens per step over']").count() == 1
        assert await page.locator("svg[aria-label^='Tokens per second over']").count() == 2


async def test_the_key_is_asked_for_and_kept_in_memory_only(browser: Browser, tmp_path: Path) -> None:
    keys = KeyRing(parse_keys(f"alice {KEY}", "keys"))
    app = create_app(HttpApi(tmp_path).client, LIMITS, keys=keys, page=PageSettings(9000))
    async with listening(app) as url, opened(browser, f"{url}/", expects_errors=True) as page:
        await page.wait_for_selector("#key-dialog[open]")
        await page.fill("#key", "wrong-key-0123456789")
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#notice:not([hidden])")
        await page.wait_for_selector("#key-dialog[open]")
        await page.fill("#key", KEY)
        await page.keyboard.press("Enter")
        await page.wait_for_selector("#method:not([hidden])")
        await ask(page, "hi", tokens=30)
        assert await last_text(page) == "hello the world"
        stored = await page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
        assert stored == '[{},{},""]'
        assert KEY not in await page.content()
