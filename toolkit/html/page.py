"""The frame of a page: title, style and script inside one file, no request to any other."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from device.files import replace_file
from toolkit.errors import BuildError
from toolkit.html.markup import Html, join, markup, paragraph

_FOLDER = Path(__file__).parent
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, lead: str, parts: Iterable[Html]) -> str:
    """Return a whole page; `lead`: one line below the title."""
    head = (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{markup(title)}</title><style>{_asset('style.css')}</style></head>"
    )
    body = join([Html(f"<h1>{markup(title)}</h1>"), paragraph(lead, "muted"), *parts])
    return f"{head}<body><main>{body}</main><script>{_asset('page.js')}</script></body></html>\n"


def write_page(path: Path, text: str) -> None:
    """Write a page whole or not at all. Raises BuildError: it cannot be written."""
    try:
        replace_file(path, text.encode("utf-8", errors="replace"))
    except OSError as error:
        raise BuildError(
            f"{path} cannot be written: {error.strerror}; use another place"
        ) from error


@cache
def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
