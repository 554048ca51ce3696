"""What the device shall run, and how far that is: the value that all parts of an update share."""

import logging
from dataclasses import dataclass

from device.protocol.documents import Desired, Update
from device.trust.exchange import TRUSTED, Trusted, Verdict
from device.update.decisions import update_of

IDLE = Update(phase="idle")
LOG = logging.getLogger("tandem.agent")


@dataclass(slots=True)
class UpdateStatus:
    """The desired state (None: none is known), what its signatures say, and the report on it.

    `sideloaded`: somebody brought it to the board, by cable, stick or SSH.
    """

    desired: Desired | None = None
    verdict: Verdict = TRUSTED
    sideloaded: bool = False
    update: Update = IDLE

    @property
    def trusted(self) -> Desired | None:
        """The desired state whose signatures are known to fit, None if there is none."""
        return self.desired if isinstance(self.verdict, Trusted) else None

    def refuse(self, desired: Desired, reason: str) -> None:
        """Report that the release is refused."""
        LOG.error("refused %s: %s", desired.release.name, reason)
        self.update = update_of(desired, "refused", reason=reason)
