"""The page at /, in a real browser: text streams in, the pool fills, errors are shown."""

import os
import re
import shutil

import pytest
from http_server import EchoEngine, begin, eventually, serving

playwright = pytest.importorskip("playwright.sync_api")
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--single-process", "--no-zygote"]


@pytest.fixture
def page():
    if not BROWSER:
        pytest.skip("no Chromium on PATH, and CHROMIUM names none")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = browser.new_page()
        page.set_default_timeout(20_000)
        yield page
        browser.close()


class OwningEngine(EchoEngine):
    """Each request owns a block for every token."""

    def owners(self):
        owners, start = super().owners(), 0
        for request, count in self.scheduler.running:
            owners[start : start + count] = request.id
            start += count
        return owners


def test_text_streams_in_and_the_pool_fills(page, tmp_path):
    engine, problems, hosts = OwningEngine(max_seq_len=4000), [], set()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda line: problems.append(line.text) if line.type == "error" else None)
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    with serving(engine, tmp_path) as server:
        page.goto(server.url)
        page.get_by_text("0 of 250 blocks of 16 tokens owned").wait_for()
        assert page.locator("h1").inner_text() == "echo"
        page.get_by_label("prompt").fill("é<b>😀")
        page.get_by_label("tokens").fill("36")
        page.get_by_role("button", name="Continue").click()
        page.get_by_text("0 requests run").wait_for()
        page.wait_for_function("document.getElementById('go').disabled === false")
        assert page.locator("#answer").inner_text() == "é<b>😀" * 4

        engine.delay = 0.01
        page.get_by_label("tokens").fill("3000")
        page.get_by_role("button", name="Continue").click()
        eventually(lambda: server.thread.tickets)
        page.wait_for_function("document.getElementById('answer').textContent.length > 20")
        page.wait_for_function("parseInt(document.getElementById('pool').textContent) > 5")
        painted = "Array.from(document.getElementById('blocks').getContext('2d')"
        painted += ".getImageData(0, 0, 64, 4).data).some(value => value > 0)"
        assert page.evaluate(painted)
        page.get_by_role("button", name="Stop").click()
        eventually(lambda: not server.thread.tickets)

        page.get_by_label("at a time").fill("32")
        with begin(server.url, max_tokens=3000):
            eventually(lambda: server.thread.tickets)
            page.get_by_role("button", name="Continue").click()
            page.get_by_text("try again in a second").wait_for()
        eventually(lambda: not server.thread.tickets)
        page.get_by_role("button", name="Continue").click()
        page.get_by_text("8 requests run, 24 wait").wait_for()
        page.get_by_role("button", name="Stop").click()
        eventually(lambda: not server.thread.tickets)
        page.get_by_label("at a time").fill("1")

        page.get_by_label("prompt").fill("x" * 5000)
        page.get_by_role("button", name="Continue").click()
        page.get_by_text("at most 4000 fit before an answer").wait_for()
    assert [each for each in problems if not re.search("400|429", each)] == []
    assert hosts == {server.url.removeprefix("http://")}
