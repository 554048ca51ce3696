"""The errors that Tandem raises on purpose.

Each message is one sentence: what is wrong, where, the limit against what was found, and what to
do. The command line prints exactly that sentence and exits with status 1.
"""


class TandemError(Exception):
    """Root of every error that a user can cause and mend.

    `exit_status` is what the command line ends with."""

    exit_status = 1


class ConfigError(TandemError):
    """A configuration file (TOML) is missing, unreadable or holds a wrong or unknown key."""


class PreprocessingError(TandemError, ValueError):
    """The values of a preprocessing contradict each other.

    A ValueError too: msgspec then adds the place in the file."""


class ProfileError(TandemError):
    """A device profile does not exist or does not fit."""


class EngineError(TandemError):
    """An engine file is missing, damaged, hostile or of another format version."""


class DamagedEngineError(EngineError):
    """Bytes of an engine are not those that were written: a checksum says so."""


class SessionError(TandemError):
    """An engine cannot be run here, or was given inputs that it does not take."""


class DlaError(TandemError, ValueError):
    """The DLA's arithmetic was given an array or a register value that the hardware cannot hold.

    A ValueError too: it is one of arguments, not of files."""


class ArrayFileError(TandemError):
    """A .npy or .npz file is damaged or hostile, or larger than who reads it takes.

    The message is the cause alone; who reads the file names it."""


class BundleError(TandemError):
    """A bundle is missing, damaged or inconsistent."""


class BundleReadError(BundleError):
    """The disk did not give what a bundle holds: that says nothing of the bundle."""


class StateError(TandemError):
    """The agent's state directory cannot be used, or does not take what has to be written."""


class TransferError(TandemError):
    """A blob could not be fetched or does not match its hash."""


class TrustError(TandemError):
    """A signature, a key or signed metadata does not allow what was asked."""


class DeployError(TandemError):
    """A device refused a release or rolled it back."""


class BrokerError(TandemError):
    """The MQTT broker cannot be reached or started."""


class PipelineError(TandemError):
    """A pipeline cannot start or had to stop."""


class SourceError(PipelineError):
    """A camera, stream, file or folder of pictures cannot be read."""


LONGEST_QUOTE = 300  # characters of a library's message that ours repeat


def shortened(text: str) -> str:
    """Leave out the beginning of a long message of a library: the end says what is wrong."""
    if len(text) <= LONGEST_QUOTE:
        return text
    end = text[-LONGEST_QUOTE:]
    return f"... {end.partition(' ')[2] or end}"
