"""`python -m device.trust`: check one desired document. See `device.trust.exchange`.

A process of its own, as the libraries of a check take as much memory as the agent itself.
"""

import os
import sys
import time

import msgspec

from device.install_advice import pip_install
from device.trust.exchange import Line, Refused, Request, Verdict, encode_line


def main() -> None:
    """Read a request, write requests for files and the verdict."""
    begun_s = time.monotonic()
    os.umask(0o077)  # the metadata that are kept are for this user alone
    request = msgspec.json.decode(sys.stdin.buffer.readline(), type=Request)
    sys.stdout.buffer.write(encode_line(Line(verdict=_verdict(request, begun_s))))
    sys.stdout.buffer.flush()
    os._exit(0)  # a thread waits for more of the agent, which would hold up the end


def _verdict(request: Request, begun_s: float) -> Verdict:
    try:
        from device.trust.fetchers import make_fetcher
        from device.trust.verify import verify
    except ModuleNotFoundError as error:
        return Refused(
            reason=f"a signed release needs the package {error.name}, which is not installed on "
            f"this board: {pip_install('fleet')}",
            again=True,
        )
    deadline_s = begun_s + request.timeout_s
    fetcher = make_fetcher(request.repository, sys.stdin.buffer, sys.stdout.buffer, deadline_s)
    return verify(request, fetcher)


if __name__ == "__main__":
    main()
