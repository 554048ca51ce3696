"""Profiles, pipelines and models as data, found the same way from a checkout and from a wheel."""

from pathlib import Path

ROOT = Path(__file__).parent
