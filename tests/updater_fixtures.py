"""An updater on a real state folder, and a bundle whose parts it is given."""

import hashlib
import sys
from pathlib import Path

from mqtt_fixtures import PROFILE, make_bundle

from device.agent.config import AgentConfig, BrokerTable
from device.agent.pipeline_process import PipelineEvent, ProcessRow
from device.agent.pipeline_runner import PipelineRunner
from device.agent.preparation import Preparation
from device.agent.updater import Updater
from device.protocol.documents import DOCUMENT_FORMAT, BlobSpec, Desired, ReleaseSpec
from device.trust.exchange import TRUSTED
from device.update.slot_store import SlotStore

CHUNK_BYTES = 64 * 1024


SLEEPER = ProcessRow("pipeline", (sys.executable, "-c", "import time; time.sleep(60)"), ())


class Board:
    """An updater on a real state directory, and a bundle whose parts it is given."""

    def __init__(self, folder: Path, preparation: Preparation | None = None) -> None:
        config = AgentConfig(
            device="dev1",
            profile=PROFILE,
            state_dir=str(folder / "state"),
            dev=True,
            broker=BrokerTable(host="127.0.0.1"),
        )
        data = make_bundle(folder / "bundle").read_bytes()
        self.chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
        self.index = b"".join(hashlib.sha256(chunk).digest() for chunk in self.chunks)
        self.blob = BlobSpec(
            sha256=hashlib.sha256(data).hexdigest(),
            bytes=len(data),
            chunk_bytes=CHUNK_BYTES,
            index_sha256=hashlib.sha256(self.index).hexdigest(),
        )
        self.store = SlotStore(folder / "state")
        self.events: list[PipelineEvent] = []
        self.pipeline = PipelineRunner(config, "", SLEEPER, self.events.append)
        self.updater = Updater(config, self.store, self.pipeline, lambda: None, preparation)
        self.updater.boot()
        self.updater.on_desired(self.desired("first"), TRUSTED)

    def desired(self, request: str, *, retry: bool = False) -> Desired:
        release = ReleaseSpec(name="good", version="1", profile=PROFILE, blob=self.blob)
        return Desired(format=DOCUMENT_FORMAT, request=request, release=release, retry=retry)

    def deliver_all(self) -> None:
        self.updater.downloads.take(self.blob.sha256, "index", self.index, 0.0)
        for number, chunk in enumerate(self.chunks):
            self.updater.downloads.take(self.blob.sha256, str(number), chunk, 0.0)

    def close(self) -> None:
        self.updater.shut_down()
        self.store.close()
