"""The page in a real browser over a scripted engine: the shortest way through it. `make page` tests all of it."""

from __future__ import annotations

import re
from pathlib import Path

from cluster.ingress.endpoints.page import Page
from cluster.ingress.http import create_app
from tests.support.browser import chromium, opened
from tests.support.fakes.fake_engine import listening
from tests.support.fakes.http_app import LIMITS, HttpApi

TEXT = "hello <b>the</b> world & 🐟"


async def test_a_question_is_answered_with_its_drafts_marked(tmp_path: Path) -> None:
    api = HttpApi(tmp_path, TEXT)
    app = create_app(api.client, LIMITS, page=Page(9000))
    async with listening(app) as url, chromium() as browser, opened(browser, f"{url}/") as page:
        await page.fill("#max-tokens", "40")
        await page.fill("#seed", "18446744073709551615")
        await page.fill("#prompt", "hi")
        await page.keyboard.press("Enter")
        await page.wait_for_selector(".message.assistant .foot")
        assert await page.inner_text(".message.assistant .text") == TEXT
        drafted = await page.locator(".message.assistant .token.draft").all_inner_texts()
        own = await page.locator(".message.assistant .token.target").all_inner_texts()
        assert drafted
        assert own
        origins = await page.inner_text("#origins")
        counts = re.fullmatch(r"Accepted drafts: (\d+) from the request itself, (\d+) from earlier answers\.", origins)
        assert counts is not None and int(counts[1]) + int(counts[2]) >= len(drafted), origins
        assert origins[17:-1] in await page.inner_text(".message.assistant .foot")
        titles = [await token.get_attribute("title") for token in await page.locator(".token.draft").all()]
        assert any((title or "").endswith(", from earlier answers") for title in titles)
        await page.locator("#strip .bar").first.click()
        assert await page.inner_text("#pass-number") == f"1 of {await page.locator('#strip .bar').count()}"
        assert await page.locator("#tree svg .node.target").count() == 1
        assert await page.locator("#tree svg .node.rejected").count() == 1
        assert api.engine.requests[0].sampling.seed == 18446744073709551615
        await page.click(".foot >> text=Receipt")
        await page.click("#verify")
        await page.wait_for_selector("#verdict.good")
