"""The phases of an update, as `tandem deploy` and `tandem flash` show them."""

# Phase in the device's report -> text for the user.
PHASES = {
    "waiting": "waiting for the device",
    "idle": "waiting for the device",
    "verifying": "checking its signatures",
    "downloading": "downloading",
    "staging": "checking and unpacking",
    "trial": "on trial",
    "postponed": "postponed, its source gives nothing",
    "live": "live",
    "rolled_back": "rolled back",
    "refused": "refused",
    "superseded": "superseded",
    "timeout": "silent",
}
# What `tandem flash` does beside these.
SENDING = {
    "comparing": "the board compares",
    "sending": "sending",
    "reconnecting": "connecting again",
    "withdrawing": "taking the release back",
}


def phase_text(phase: str) -> str:
    """Return the text of a phase of `toolkit.fleet.transports.transport.Progress`."""
    return SENDING.get(phase) or PHASES.get(phase, phase)
