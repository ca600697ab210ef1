"""The page at /, in a real browser: text streams in, the pool fills, errors are shown."""

import os
import re
import shutil

import pytest
from http_server import EchoEngine, begin, eventually, serving
from pagedattn_serving.server.guards import guards

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


COLOUR_OF = """block => Array.from(at('blocks').getContext('2d')
    .getImageData(block % 64 * 8, Math.floor(block / 64) * 8, 1, 1).data.slice(0, 3))"""
# The contrast of the texts to what is behind them, as WCAG 2 defines it.
CONTRASTS = """() => {
  const light = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number).map(v => v / 255)
    .map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = e => {
    const colour = getComputedStyle(e).backgroundColor;
    return colour.endsWith(", 0)") ? ground(e.parentElement) : colour;
  };
  return [...document.querySelectorAll("h1, h2, p, label, input, output, li, button:enabled")]
    .map(e => [getComputedStyle(e).color, ground(e)].map(light).sort((a, b) => a - b))
    .map(([dark, bright]) => (bright + .05) / (dark + .05));
}"""


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
        assert page.locator("h1").inner_text() == "echo served by pagedattn"
        page.get_by_label("prompt").fill("é<b>😀")
        page.get_by_label("tokens").fill("36")
        page.get_by_role("button", name="Continue").click()
        page.get_by_text("0 requests run").wait_for()
        page.wait_for_function("document.getElementById('go').disabled === false")
        assert page.locator("#answer").inner_text() == "é<b>😀" * 4
        rate = page.locator("#rate").inner_text()
        detail = r"\(36 tokens in [\d.]+ s, the first after \d+ ms\)"
        assert re.fullmatch(rf"\d+ tokens a second {detail}", rate)
        assert page.title() == "echo, served by pagedattn"

        engine.delay = 0.01
        page.get_by_label("tokens").fill("3000")
        page.get_by_role("button", name="Continue").click()
        eventually(lambda: server.thread.tickets)
        page.wait_for_function("document.getElementById('answer').textContent.length > 20")
        page.wait_for_function("parseInt(document.getElementById('pool').textContent) > 5")
        first, last = (page.evaluate(COLOUR_OF, block) for block in (0, 249))
        assert max(first) - min(first) > 100 > 20 > max(last) - min(last)
        counts = page.evaluate("['owned', 'cached', 'free'].map(id => +at(id).textContent)")
        assert counts[0] > 5
        assert sum(counts) == 250
        page.get_by_role("button", name="Stop").click()
        eventually(lambda: not server.thread.tickets)

        page.get_by_label("requests").fill("32")
        with begin(server.url, max_tokens=3000):
            eventually(lambda: server.thread.tickets)
            page.get_by_role("button", name="Continue").click()
            page.get_by_text("try again in a second").wait_for()
        eventually(lambda: not server.thread.tickets)
        page.get_by_role("button", name="Continue").click()
        page.get_by_text("8 requests run, 24 wait").wait_for()
        page.get_by_role("button", name="Stop").click()
        eventually(lambda: not server.thread.tickets)
        page.get_by_label("requests").fill("1")

        page.get_by_label("prompt").fill("x" * 5000)
        page.get_by_role("button", name="Continue").click()
        page.get_by_text("at most 4000 fit before an answer").wait_for()
    assert [each for each in problems if not re.search("400|429", each)] == []
    assert hosts == {server.url.removeprefix("http://")}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_legible_on_a_phone_by_day_and_by_night(page, tmp_path, scheme):
    page.set_viewport_size({"width": 360, "height": 740})
    page.emulate_media(color_scheme=scheme)
    with serving(OwningEngine(), tmp_path) as server:
        page.goto(server.url)
        page.get_by_role("button", name="Continue").click()
        page.get_by_text("tokens a second").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert min(page.evaluate(CONTRASTS)) >= 4.5
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (int(re.findall(r"\d+", paper)[0]) > 128) == (scheme == "light")
        controls = (
            "[...document.querySelectorAll('input, textarea, button')].filter(e => e.offsetParent)"
        )
        sizes = f"{controls}.map(e => [e.offsetHeight, parseFloat(getComputedStyle(e).fontSize)])"
        for height, letters in page.evaluate(sizes):
            assert height >= 42  # a finger's width
            assert letters >= 16  # else phones zoom in on what is typed


def test_it_asks_for_the_key_that_the_server_wants(page, tmp_path):
    with serving(OwningEngine(), tmp_path, middleware=guards("sk-1", ())) as server:
        page.goto(server.url)
        page.get_by_label("key").fill("sk-2")
        page.get_by_role("button", name="Use it").click()
        page.get_by_label("key").wait_for()
        page.get_by_label("key").fill("sk-1")
        page.get_by_role("button", name="Use it").click()
        page.get_by_label("prompt").fill("ab")
        page.get_by_label("tokens").fill("5")
        page.get_by_role("button", name="Continue").click()
        page.get_by_text("5 tokens in").wait_for()
        assert page.locator("#answer").inner_text() == "ababa"
        assert not page.get_by_label("key").is_visible()
