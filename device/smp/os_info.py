"""SMP's questions after the system: `os info`, in the letters of uname, and the date."""

import os
import time
from collections.abc import Mapping

from device.smp.cbor import Scalar, Value
from device.smp.message import Code, SmpError

FIELDS = "snrvbmpio"  # the order in which they are answered, whatever the order of the request


def system_info(request: Mapping[str, Scalar], module: str) -> dict[str, Value]:
    """Answer `os info`; `module` is what the hardware is, or the profile where that is not known.

    `format`: the letters of Zephyr's specification, "a" for all; "s" alone where there is none.
    """
    letters = request.get("format") or "s"
    if not isinstance(letters, str) or not set(letters) <= set(f"{FIELDS}a"):
        raise SmpError(Code.INVALID, f"format takes letters of {FIELDS}a")
    system = os.uname()
    texts = {
        "s": system.sysname,
        "n": system.nodename,
        "r": system.release,
        "v": system.version,
        "b": "unknown",  # the date of a kernel's build is in its version
        "m": system.machine,
        "p": system.machine,
        "i": module,
        "o": "GNU/Linux",
    }
    chosen = FIELDS if "a" in letters else [letter for letter in FIELDS if letter in letters]
    return {"output": " ".join(texts[letter] for letter in chosen)}


def date_and_time(_peer: object, _request: Mapping[str, Scalar]) -> dict[str, Value]:
    """Answer the date and time of the board, UTC."""
    return {"datetime": time.strftime("%Y-%m-%dT%H:%M:%S.000000+00:00", time.gmtime())}
