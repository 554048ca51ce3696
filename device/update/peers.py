"""The servers of a download: which one is asked, for how much, and which are not trusted."""

from collections.abc import Callable
from dataclasses import dataclass

from device.update.window import Window

MAX_CORRUPT_IN_A_ROW = 64  # of one peer: it is not asked by its name any more
MAX_PEERS = 16
ANYONE = ""  # a request to all peers; also the peer that sends chunks without its name


@dataclass(slots=True)
class _Peer:
    """A server: how much it is asked for at once, and how many parts in a row did not fit."""

    window: Window
    corrupt: int = 0
    last_corrupt: str = ""
    refusal: str = ""  # why it does not have the blob

    @property
    def trusted(self) -> bool:
        """Whether it is asked by its name."""
        return self.corrupt < MAX_CORRUPT_IN_A_ROW and not self.refusal


class Peers:
    """The servers that have answered, by name. `current`: the one that requests go to."""

    def __init__(self, new_window: Callable[[], Window]) -> None:
        self.current = ANYONE
        self._new_window = new_window
        self._peers = {ANYONE: _Peer(new_window())}

    @property
    def window(self) -> Window:
        """What the server that is asked may be asked for at once."""
        return self._peers[self.current].window

    @property
    def complaint(self) -> str:
        """Which servers send what does not fit, empty if none does."""
        return "; ".join(filter(None, map(self.complaint_of, self._peers)))

    @property
    def refusals(self) -> str:
        """What the servers said that do not have the blob."""
        return "; ".join(peer.refusal for peer in self._peers.values() if peer.refusal)

    def complaint_of(self, name: str) -> str:
        """Return what a server sends that does not fit; empty while it is trusted."""
        peer = self._peers.get(name)
        if peer is None or peer.corrupt < MAX_CORRUPT_IN_A_ROW:
            return ""
        return (
            f"{f'the server {name}' if name else 'a server'} sent {peer.corrupt} parts in a row "
            f"that do not match their hashes (the last: {peer.last_corrupt}): it holds another "
            "file, deploy again"
        )

    def window_of(self, name: str) -> Window:
        """Return the window of a server that was asked."""
        return self._peers[name].window

    def ask_anyone(self, *, silent: bool) -> None:
        """Ask all from now on; `silent`: nothing came for long."""
        self.current = ANYONE
        self.window.restart(silent=silent)

    def forgive(self) -> None:
        """Ask again those that did not have the blob."""
        for peer in self._peers.values():
            peer.refusal = ""

    def count_good(self, name: str) -> None:
        """Ask a server that sent what fits by its name, if none is asked."""
        peer = self._peer(name)
        if peer is None:
            return
        peer.corrupt, peer.refusal = 0, ""
        if self.current == ANYONE:
            self.current = name

    def count_corrupt(self, name: str, what: str) -> bool:
        """Halve the window of a server; ask others once too many in a row did not fit.

        Return whether it is still trusted.
        """
        peer = self._peer(name)
        if peer is None:
            return False
        peer.corrupt += 1
        peer.last_corrupt = what
        peer.window.on_corrupt()
        if not peer.trusted and self.current == name:
            rivals = {rival: row.window.bytes for rival, row in self._peers.items() if row.trusted}
            rivals.pop(ANYONE, None)
            self.current = max(rivals, key=lambda rival: rivals[rival], default=ANYONE)
        return peer.trusted

    def note_refusal(self, name: str, reason: str) -> bool:
        """Note that a server does not have the blob; return False for one server too many."""
        peer = self._peer(name)
        if peer is not None:
            peer.refusal = reason
        return peer is not None

    def _peer(self, name: str) -> _Peer | None:
        """Return a server, None for one too many: names are free to make up."""
        if name not in self._peers and len(self._peers) >= MAX_PEERS:
            return None
        return self._peers.setdefault(name, _Peer(self._new_window()))
