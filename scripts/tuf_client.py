"""The client that TUF's conformance suite drives: the board's own check of metadata.

    tuf_client.py --metadata-dir DIR init ROOT
    tuf_client.py --metadata-dir DIR --metadata-url URL refresh
    tuf_client.py ... --target-name NAME --target-base-url URL --target-dir DIR download

The suite is a web server. TANDEM_TUF_TRANSPORT says how its files reach the client: `http`;
`folder`, into which each file is copied before it is read; or `mqtt`: over the broker at
TANDEM_TUF_BROKER_PORT, from the server of `tandem deploy` with such a folder, through the pipes of
the agent. See scripts/tuf_conformance.sh.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import msgspec
from tuf.api.exceptions import DownloadError, DownloadHTTPError, LengthOrHashMismatchError
from tuf.api.metadata import TargetFile

from device.errors import TandemError, TrustError
from device.protocol.documents import TufGet, TufReply, encode
from device.protocol.mqtt import Link, LinkDown, LinkEvent, LinkSettings, LinkUp, Message
from device.protocol.topics import Topics
from device.trust.exchange import Line, Part, encode_line
from device.trust.fetchers import FolderFetcher, HttpFetcher, RelayFetcher, WholeFileFetcher
from device.trust.journal import Journal
from device.trust.repository import TrustedRepository
from toolkit.fleet.server.metadata import MetadataServer

TRUSTED = Path("trusted/root.json")  # below the metadata folder, which the suite lists
WAIT_S = 30.0


class MirroredFolder(FolderFetcher):
    """A folder that has each file of a web server by the time it is read."""

    def __init__(self, url: str, folder: Path) -> None:
        super().__init__(folder)
        self._web = HttpFetcher(url)
        self._mirror = folder

    def read(self, path: str) -> bytes:
        self.copy(path)
        return super().read(path)

    def copy(self, path: str) -> None:
        """Bring one file up to date."""
        copied = self._mirror / path
        try:
            data = self._web.read(path)
        except DownloadHTTPError:
            copied.unlink(missing_ok=True)
            return
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(data)


class MqttRelay:
    """Both ends of the way over MQTT: the agent's, with its pipes, and the server's."""

    def __init__(self, port: int, mirror: MirroredFolder, folder: Path) -> None:
        self._topics = Topics(f"conformance-{os.getpid()}")
        self._mirror = mirror
        self._server = MetadataServer(folder)
        requests, replies = os.pipe(), os.pipe()
        self.requests_out = os.fdopen(requests[1], "wb")
        self.replies_in = os.fdopen(replies[0], "rb")
        self._requests_in = os.fdopen(requests[0], "rb")
        self._replies_out = os.fdopen(replies[1], "wb")
        self._server_link = self._connect(port, "server", self._topics.tuf_get, self._serve)
        self._agent_link = self._connect(port, "agent", self._topics.tuf_replies, self._pass_on)
        threading.Thread(target=self._ask, daemon=True).start()

    def _connect(self, port: int, name: str, topic: str, take: Callable[[Message], None]) -> Link:
        up = threading.Event()

        def put(event: LinkEvent) -> None:
            if isinstance(event, LinkUp):
                up.set()
            elif isinstance(event, Message):
                take(event)
            elif isinstance(event, LinkDown):
                print(event.reason, file=sys.stderr)

        client = f"{self._topics.device}-{name}"
        link = Link(LinkSettings("127.0.0.1", port, client, ((topic, 1),), "5"), put)
        link.start()
        if not up.wait(WAIT_S):
            raise TrustError(f"no broker on port {port}")
        return link

    def _ask(self) -> None:
        for text in self._requests_in:
            line = msgspec.json.decode(text, type=Line)
            if line.get is not None:
                self._agent_link.publish(self._topics.tuf_get, encode(line.get), qos=0)

    def _serve(self, message: Message) -> None:
        get = msgspec.json.decode(message.payload, type=TufGet)
        try:
            self._mirror.copy(get.path)
        except DownloadError:  # the suite's server gave no answer
            failed = encode(TufReply(status=500)) + b"\n"
            self._server_link.publish(self._topics.tuf_reply(get.id, 0), failed, qos=0)
            return
        self._server.handle(self._server_link, message)

    def _pass_on(self, message: Message) -> None:
        request, number = message.topic.split("/")[-2:]
        part = Part(id=request, number=int(number), bytes=len(message.payload))
        self._replies_out.write(encode_line(part) + message.payload)
        self._replies_out.flush()

    def close(self) -> None:
        """Disconnect both ends."""
        self._agent_link.close()
        self._server_link.close()


@contextmanager
def open_fetcher(url: str) -> Iterator[WholeFileFetcher]:
    """Yield the fetcher of the transport for the repository at a URL."""
    transport = os.environ.get("TANDEM_TUF_TRANSPORT", "http")
    if transport == "http":
        yield HttpFetcher(url)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        mirror = MirroredFolder(url, folder)
        if transport == "folder":
            yield mirror
            return
        relay = MqttRelay(int(os.environ["TANDEM_TUF_BROKER_PORT"]), mirror, folder)
        try:
            yield RelayFetcher(relay.replies_in, relay.requests_out, float("inf"))
        finally:
            relay.close()


def run(arguments: argparse.Namespace) -> None:
    """Do what the suite asks; TandemError if the metadata do not allow it."""
    metadata = Path(arguments.metadata_dir)
    if arguments.command == "init":
        root = Path(arguments.trusted_root).read_bytes()
        (metadata / TRUSTED).parent.mkdir()
        (metadata / TRUSTED).write_bytes(root)
        (metadata / "root.json").write_bytes(root)
        return
    url = arguments.metadata_url.rstrip("/").removesuffix("/metadata")
    with open_fetcher(url) as fetcher:
        trusted_root = (metadata / TRUSTED).read_bytes()
        journal = Journal(metadata / "journal")
        repository = TrustedRepository(trusted_root, metadata, fetcher, journal)
        repository.refresh()
        for name in arguments.target_name or ():
            target = repository.target(name)
            if target is None:
                raise TrustError(f"there is no target {name}")
            path = Path(arguments.target_dir) / quote(name, "")
            if not is_there(target, path):
                repository.fetch(target, path)


def is_there(target: TargetFile, path: Path) -> bool:
    """Whether a file is the target already."""
    with contextlib.suppress(OSError, LengthOrHashMismatchError), path.open("rb") as file:
        target.verify_length_and_hashes(file)
        return True
    return False


def main() -> int:
    """The command line of the suite."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--metadata-dir", required=True)
    for option in ("--metadata-url", "--target-dir", "--target-base-url"):
        parser.add_argument(option)
    parser.add_argument("--target-name", action="append")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("init").add_argument("trusted_root")
    commands.add_parser("refresh")
    commands.add_parser("download")
    try:
        run(parser.parse_args())
    except TandemError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # a thread may wait for a pipe, which would hold up the end
