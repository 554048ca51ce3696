"""A client of the agent's control socket, and what it asks for."""

import subprocess
import uuid
from pathlib import Path

import msgspec
from mqtt_fixtures import WAIT_S, AgentBox

from device.control.client import Client
from device.errors import StateError
from device.protocol.documents import DOCUMENT_FORMAT, Desired, ReleaseSpec
from device.update.bundle import read_bundle_info
from toolkit.fleet.bundles.blob import Blob


def client_of(board: AgentBox) -> Client:
    """A connection once the agent listens."""
    for _ in range(int(WAIT_S / 0.05)):
        try:
            return Client(board.state_dir)
        except StateError:
            assert board.process is not None
            assert board.process.poll() is None, board.log()
            try:
                board.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
    raise AssertionError(board.log())


def desired_of(bundle: Path, **changes: object) -> Desired:
    info, blob = read_bundle_info(bundle), Blob(bundle)
    blob.close()
    release = ReleaseSpec(
        name=info.name, version=info.version, profile=info.profile, blob=blob.spec
    )
    document = Desired(format=DOCUMENT_FORMAT, request=uuid.uuid4().hex, release=release)
    return msgspec.structs.replace(document, **changes)
