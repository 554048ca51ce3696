"""The devices of a server as it keeps them: of all of them when they were last heard, and the
rows of those that were heard lately. The others are read from the store when they are asked for."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping

from toolkit.fleet.rollout.liveness import LastHeard, place_of
from toolkit.fleet.store.database import Database
from toolkit.fleet.store.device_queries import load_voices
from toolkit.fleet.store.devices import DeviceRow, load_device, load_devices, save_beats

MAX_ROWS = 20_000  # about 4 kB each


class DeviceCache(MutableMapping[str, DeviceRow]):
    """Id -> device. What is set here is not in the store: `save_beats` brings it there. One thread
    uses it."""

    def __init__(self, database: Database, owns: Callable[[str], bool]) -> None:
        """`owns`: whether a device is this server's."""
        self._database = database
        self.voices = {row.device: row for row in load_voices(database) if owns(row.device)}
        self._rows: OrderedDict[str, DeviceRow] = OrderedDict()  # the one used last is last
        self.unsaved: dict[str, DeviceRow] = {}

    def __getitem__(self, device: str) -> DeviceRow:
        row = self.unsaved.get(device) or self._rows.get(device)
        if row is None and device in self.voices:
            row = load_device(self._database, device)
        if row is None:
            raise KeyError(device)
        self._keep(row)
        return row

    def __setitem__(self, device: str, row: DeviceRow) -> None:
        self.voices[device] = voice_of(row)
        self.unsaved[device] = row

    def __delitem__(self, device: str) -> None:
        del self.voices[device]
        self._rows.pop(device, None)
        self.unsaved.pop(device, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.voices)

    def __len__(self) -> int:
        return len(self.voices)

    def fetch(self, devices: Iterable[str]) -> None:
        """Read the rows of many devices at once, where they are not at hand."""
        names = [name for name in devices if name in self.voices and name not in self._rows]
        for row in load_devices(self._database, names[:MAX_ROWS]):
            self._keep(row)

    def inherit(self, previous: "DeviceCache") -> None:
        """Take the rows at hand of a cache of before servers came or went: what was and is this
        server's, no other one has written."""
        for device, row in previous._rows.items():
            if device in self.voices:
                self._keep(row)

    def take_saved(self, rows: Iterable[DeviceRow]) -> None:
        """Take rows that the store has."""
        for row in rows:
            self.voices[row.id] = voice_of(row)
            self.unsaved.pop(row.id, None)
            self._keep(row)

    def save_beats(self) -> None:
        """Keep when devices were heard in the store, in a write transaction."""
        save_beats(self._database, self.unsaved.values())
        for row in self.unsaved.values():
            self._keep(row)
        self.unsaved.clear()

    def _keep(self, row: DeviceRow) -> None:
        self._rows[row.id] = row
        self._rows.move_to_end(row.id)
        while len(self._rows) > MAX_ROWS:
            self._rows.popitem(last=False)


def voice_of(row: DeviceRow) -> LastHeard:
    """Return when a device was last heard, and where it is."""
    return LastHeard(row.id, row.heard_s, row.beat_s, place_of(row.all_labels))
