"""The error of the calibration package; see `device.errors` for the form of its messages."""

from device.errors import TandemError


class CalibrationError(TandemError):
    """Calibration data or a calibration table is missing, unusable or does not fit the model."""


class NoSampleError(CalibrationError):
    """There was no sample that could be read."""
