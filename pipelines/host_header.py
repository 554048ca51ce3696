"""Whether a request over HTTP is for a server of ours, by its header Host."""

import ipaddress
import re


def is_loopback(host: str) -> bool:
    """Whether a name or address of a server is of this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def answers(bound: str, host: str) -> bool:
    """Whether a server bound to a host is to answer a request for `host`, HOST or HOST:PORT.

    A page elsewhere may have its name point here (DNS rebinding); it is not shown what only this
    machine may see.
    """
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    return not is_loopback(bound) or is_loopback(name.strip("[]"))
