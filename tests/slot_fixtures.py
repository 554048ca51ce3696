"""State folders with releases in their slots."""

import hashlib
from pathlib import Path

from mqtt_fixtures import make_bundle

from device.update import slots
from device.update.slot_store import SlotStore
from device.update.slots import SlotRecord, SlotState


def record(name: str) -> SlotRecord:
    return SlotRecord(sha256=name * 64, bytes=1, name=name, version="1", request=f"r-{name}")


def live(name: str, state: SlotState = SlotState()) -> SlotState:  # noqa: B008  (frozen)
    staged = slots.stage(slots.clear(state), record(name))
    return slots.confirm(slots.begin_trial(staged, f"r-{name}"))


def bundle_of(folder: Path, version: str) -> tuple[Path, SlotRecord]:
    path = make_bundle(folder / version, version=version, engine_bytes=5000)
    release = SlotRecord(
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        bytes=path.stat().st_size,
        name="good",
        version=version,
        request=f"r-{version}",
    )
    return path, release


def populated(root: Path, folder: Path) -> SlotStore:
    """Two live releases, the second active, as an agent leaves them."""
    store = SlotStore(root)
    state = store.load()
    for version in ("1", "2"):
        path, release = bundle_of(folder, version)
        state = store.save(slots.clear(state))
        store.populate(state.idle, path, release)
        state = store.save(slots.stage(state, release))
        state = store.save(slots.begin_trial(state, release.request))
        state = store.save(slots.confirm(state, "2026-01-02T03:04:05Z"))
    return store
