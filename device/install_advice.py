"""How to add an extra to this installation: from where pip took it."""

import json
from collections.abc import Mapping
from functools import cache
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "tandem-edge"
CHECKOUT = Path(__file__).parents[1]


def why_missing(package: str, extra: str) -> str | None:
    """Return that a package is missing, and what adds it; None: it is there."""
    return None if find_spec(package) else f"{package} is not installed; {pip_install(extra)}"


def pip_install(extra: str) -> str:
    """Return the command that adds an extra: of the checkout, of the wheel's file, or of the name
    that an index has."""
    return f"pip install {_source(extra)}"


@cache
def _source(extra: str) -> str:
    # A checkout that is the working directory has metadata of its own, which say nothing of pip.
    records = (
        distribution.read_text("direct_url.json") for distribution in distributions(name=NAME)
    )
    record = next((text for text in records if text), None)
    if record is None and (CHECKOUT / "pyproject.toml").is_file():  # run where it is
        return f"-e {quote(f'{CHECKOUT}[{extra}]')}"
    return source_of(json.loads(record or "{}"), extra)


def source_of(record: Mapping[str, Any], extra: str) -> str:
    """Return what pip is to install, by its record of the last time (PEP 610); none: the name."""
    url = str(record.get("url", ""))
    parts = urlsplit(url)
    if not url:
        return quote(f"{NAME}[{extra}]")
    if "vcs_info" in record:
        vcs = record["vcs_info"]
        revision = vcs.get("requested_revision") or vcs["commit_id"]
        return quote(f"{NAME}[{extra}] @ {vcs['vcs']}+{url}@{revision}")
    if parts.scheme != "file":
        return quote(f"{NAME}[{extra}] @ {url}")
    editable = record.get("dir_info", {}).get("editable", False)
    return f"{'-e ' if editable else ''}{quote(f'{unquote(parts.path)}[{extra}]')}"
