"""A real Chromium for tests of the page. Tests skip with the reason where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page

WAIT_MS = 60_000
"""Longest wait for something on the page, in milliseconds. Nothing takes nearly as long."""
_NAMES = ("chromium", "chromium-browser", "google-chrome")


def chromium_path() -> str:
    """The path of the installed Chromium. Skips the test if there is none."""
    pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    for name in _NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    pytest.skip("Chromium is not installed: apt-get install chromium")


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser without a window. Skips the test if there is none."""
    path = chromium_path()
    from playwright.async_api import async_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=[*arguments, "--disable-gpu"])
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def opened(
    browser: Browser,
    url: str,
    *,
    width: int = 1280,
    height: int = 860,
    dark: bool = False,
    expects_errors: bool = False,
) -> AsyncIterator[Page]:
    """The page at `url`. In the end, nothing may have been loaded from elsewhere or, by default, logged as an error."""
    context = await browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", locale="en-GB"
    )
    problems: list[str] = []
    foreign: list[str] = []
    page = await context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    origin = "/".join(url.split("/")[:3])
    page.on("request", lambda sent: None if sent.url.startswith(origin) else foreign.append(sent.url))
    await page.goto(url)
    try:
        yield page
    finally:
        await context.close()
    assert expects_errors or problems == []
    assert foreign == []
