"""The errors of the host side; see `device.errors` for the form of their messages."""

from device.errors import TandemError


class ImportModelError(TandemError):
    """A model file cannot be read, or holds something that Tandem cannot handle."""


class PlanError(TandemError):
    """A model cannot be placed on the processors of a profile."""


class BuildError(TandemError):
    """An engine cannot be built from a model, a profile and a calibration table."""
