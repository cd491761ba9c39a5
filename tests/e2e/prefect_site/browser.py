"""The Prefect UI in a real browser: Debian's Chromium, driven by Playwright."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.prefect_site.site import AUTH, ROOT

IMAGES = ROOT / "docs" / "images"
"""Pictures are kept there when SCREENSHOTS is set, and thrown away otherwise."""


def chromium() -> str | None:
    """The browser's path; None where it is not installed."""
    return shutil.which("chromium")


class Browser:
    """One page that is logged in.

    Args:
        page: a page of Playwright's.
        url: of the UI.
        folder: where pictures go.
    """

    def __init__(self, page: object, url: str, folder: Path):
        self._page, self._url, self._folder = page, url, folder
        self._log_in()

    def _log_in(self) -> None:
        page = self._page
        page.goto(self._url)  # type: ignore[attr-defined]
        field = page.locator("input[type=password]")  # type: ignore[attr-defined]
        field.wait_for(timeout=60_000)
        field.fill(AUTH)
        field.press("Enter")
        page.wait_for_url(re.compile("dashboard"), timeout=60_000)  # type: ignore[attr-defined]

    def look(self, path: str, *texts: str, tab: str = "", picture: str = "") -> str:
        """Open a page (and a tab of it), wait until it shows all the texts, keep a picture; returns the page's text."""
        page = self._page
        page.goto(f"{self._url}{path}")  # type: ignore[attr-defined]
        if tab:
            page.get_by_role("tab", name=tab).or_(page.get_by_text(tab, exact=True)).first.click(timeout=60_000)  # type: ignore[attr-defined]
        for text in texts:
            page.get_by_text(text).first.wait_for(timeout=60_000)  # type: ignore[attr-defined]
        page.wait_for_timeout(1500)  # type: ignore[attr-defined] -- charts move into place
        if picture:
            page.screenshot(path=str(self._folder / f"{picture}.png"))  # type: ignore[attr-defined]
        return str(page.inner_text("body"))  # type: ignore[attr-defined]


@contextmanager
def browser(url: str, folder: Path) -> Iterator[Browser]:
    """A browser for as long as the block runs."""
    from playwright.sync_api import sync_playwright

    kept = IMAGES if os.environ.get("SCREENSHOTS") else folder
    kept.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        # Chromium's sandbox needs rights that a container's root does not have.
        found = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            context = found.new_context(viewport={"width": 1360, "height": 900}, device_scale_factor=1)
            yield Browser(context.new_page(), url, kept)
        finally:
            found.close()
