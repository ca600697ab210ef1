"""A hook of mkdocs: links to files outside docs/ go to the repository, where they are."""

import re
from pathlib import PurePosixPath

OUTSIDE = re.compile(r"\]\(((?:\.\./)+)([\w./-]+)")


def on_page_markdown(markdown: str, *, page, config, files) -> str:
    """`../examples/demo.py`, written in docs/memory.md, leads out of docs/; a page never does."""
    depth = len(PurePosixPath(page.file.src_uri).parents)

    def to_repository(link: re.Match) -> str:
        leads_out = link[1].count("../") == depth
        return f"]({config.repo_url}/blob/main/{link[2]}" if leads_out else link[0]

    return OUTSIDE.sub(to_repository, markdown)
