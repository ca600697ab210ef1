"""A hook of mkdocs: a page that a reader opens without a network looks as it does with one.

What a page would load from elsewhere is a warning, and so an error of the strict build: scripts,
styles, fonts, pictures, frames; and Mermaid's diagrams, whose script the theme loads from a CDN.
"""

import logging
import re
from html.parser import HTMLParser
from pathlib import Path

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "srcset", "link": "href"}
LINKS_THAT_LOAD = {"stylesheet", "preload", "modulepreload", "icon", "manifest"}
FOREIGN = re.compile(r"\s*(?:https?:)?//")
IN_STYLES = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")
log = logging.getLogger("mkdocs.hooks.offline")


class Loads(HTMLParser):
    """Collects what a page loads from elsewhere."""

    def __init__(self, page: str):
        super().__init__()
        self.found: list[str] = []
        self._in_style = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        self.found += IN_STYLES.findall(given.get("style", ""))
        self.found += ["Mermaid"] if "mermaid" in given.get("class", "").split() else []
        rels = set(given.get("rel", "").split())
        address = given.get(LOADED.get(tag, ""), "")
        if FOREIGN.match(address) and (tag != "link" or rels & LINKS_THAT_LOAD):
            self.found.append(address)

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.found += IN_STYLES.findall(data)
            self._in_style = False


def on_post_page(output: str, *, page, config) -> str:
    for address in Loads(output).found:
        log.warning("%s loads %s, which is not there without a network", page.url, address)
    return output


def on_post_build(*, config) -> None:
    for path in Path(config.site_dir).rglob("*.css"):
        for address in IN_STYLES.findall(path.read_text()):
            log.warning("%s loads %s, which is not there without a network", path.name, address)
