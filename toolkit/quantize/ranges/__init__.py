"""Calibration data -> activation ranges -> a calibration table."""
