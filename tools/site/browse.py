"""Opens the built site in Chromium, light and dark, wide and narrow, and checks what a reader would meet.

    .venv/site/bin/python tools/site/browse.py .venv/build/site PICTURES   # <page>-<scheme>-<width>.png there

No page may log an error, make a request that fails or leaves the site, or be wider than the window. On the
first page the search must find a function, and the button for the colours must change them. It ends with an
error and a line for each fault.
"""

from __future__ import annotations

import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTHS = {"wide": (1280, 900), "narrow": (390, 844)}
# Whose pictures are written; the other pages are opened once each.
NAMES = ("guide/score", "guide/texts", "guide/explain", "api/scores", "benchmarks/h200", "troubleshooting")
SHOWN = ("", *(f"{name}/" for name in NAMES))


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The site's address on this machine."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


@contextmanager
def opened(browser: Browser, site: str, scheme: str, width: str, faults: list[str]) -> Iterator[Page]:
    """A page of a new window, whose faults are listed."""
    size = dict(zip(("width", "height"), WIDTHS[width], strict=True))
    context = browser.new_context(viewport=size, color_scheme=scheme)
    page = context.new_page()

    def say(what: str) -> None:
        faults.append(f"{page.url.removeprefix(site) or 'index'} ({scheme}, {width}): {what}")

    page.on("console", lambda message: say(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: say(str(error)))
    page.on("response", lambda found: say(f"{found.status} {found.url}") if found.status >= 400 else None)
    own = (site, "data:", "blob:")
    page.on("request", lambda wanted: None if wanted.url.startswith(own) else say(wanted.url))
    yield page
    context.close()


def check_width(page: Page, faults: list[str], name: str) -> None:
    beyond = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
    if beyond > 0:
        faults.append(f"{name}: {beyond} pixels wider than the window of {page.viewport_size}")


def check_search(page: Page, faults: list[str]) -> None:
    page.get_by_role("textbox", name="Search").click()
    page.keyboard.type("maxsim_with_winners", delay=20)
    result = page.locator(".md-search-result__link").first
    result.wait_for(timeout=15_000)
    result.click()
    page.wait_for_load_state()
    if "maxsim_with_winners" not in page.content():
        faults.append(f"the search for maxsim_with_winners led to {page.url}")


def check_colours(page: Page, faults: list[str]) -> None:
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    before = page.evaluate(scheme)
    page.locator("label.md-header__button:visible[for^='__palette']").click()
    if page.evaluate(scheme) == before:
        faults.append(f"the button for the colours left them {before}")


def browse(folder: Path, pictures: Path) -> list[str]:
    pictures.mkdir(parents=True, exist_ok=True)
    pages = sorted(str(path.parent.relative_to(folder)) + "/" for path in folder.rglob("index.html"))
    pages = ["" if name == "./" else name for name in pages]
    executable = next(filter(None, map(shutil.which, BROWSERS)))
    faults: list[str] = []
    with served(folder) as site, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            for width in WIDTHS:
                with opened(browser, site, scheme, width, faults) as page:
                    for name in pages if (scheme, width) == ("light", "narrow") else SHOWN:
                        page.goto(site + name)
                        check_width(page, faults, name or "index")
                        if name in SHOWN:
                            stem = name.strip("/").replace("/", "-") or "index"
                            page.screenshot(path=pictures / f"{stem}-{scheme}-{width}.png")
        with opened(browser, site, "light", "wide", faults) as page:
            page.goto(site)
            check_colours(page, faults)
            check_search(page, faults)
        browser.close()
    print(f"{len(pages)} pages opened, {len(list(pictures.glob('*.png')))} pictures in {pictures}")
    return faults


if __name__ == "__main__":
    if faults := browse(*map(Path, sys.argv[1:])):
        sys.exit("\n".join(faults))
