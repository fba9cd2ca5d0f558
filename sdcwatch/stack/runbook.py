"""The runbook as a page, served by Prometheus; the `runbook_url` of each alert leads into it."""

from __future__ import annotations

import re
from html import escape
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

from sdcwatch.errors import ConfigurationError

PAGE = "runbook.html"
SHIPPED = Path(__file__).with_name("runbook.md")
"""Where a wheel has it; a checkout has it in docs/."""
CHECKOUT = Path(__file__).parents[2] / "docs" / "runbook.md"

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}"
    "pre{background:#f4f4f4;padding:.7rem;overflow-x:auto}code{background:#f4f4f4}"
    "table{border-collapse:collapse}td,th{border:1px solid #bbb;padding:.3rem .6rem}"
    ":target{background:#fff3c4}"
)


def anchor(heading: str) -> str:
    """The anchor that code hosts give a heading: lower case, spaces to hyphens, no punctuation."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def render(markdown: str) -> str:
    """`markdown` as one HTML page whose headings can be linked to."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(markdown)
    title = "Runbook"
    for token, inline in pairwise(tokens):
        if token.type == "heading_open":
            text = "".join(child.content for child in inline.children or ())
            token.attrSet("id", anchor(text))
            title = text if token.tag == "h1" else title
    body = parser.renderer.render(tokens, parser.options, {})
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>\n{body}</html>\n"
    )


def find_runbook() -> Path | None:
    """The runbook that came with this installation, or None."""
    return next((path for path in (SHIPPED, CHECKOUT) if path.is_file()), None)


def write_runbook(source: Path, directory: Path) -> Path:
    """Render `source` into `directory` and return the page.

    Raises:
        ConfigurationError: `source` cannot be read.
    """
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        msg = f"Expected a runbook in Markdown at {source}, but got: {error}. Pass another path."
        raise ConfigurationError(msg) from error
    directory.mkdir(parents=True, exist_ok=True)
    page = directory / PAGE
    page.write_text(render(text), encoding="utf-8")
    return page
