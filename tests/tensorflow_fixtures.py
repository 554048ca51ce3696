"""The environment with TensorFlow."""

import os
from pathlib import Path

import pytest

from toolkit.importers.tensorflow import VARIABLE

ROOT = Path(__file__).parents[1]


@pytest.fixture
def tensorflow(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The interpreter with TensorFlow, in the place where Tandem looks for it."""
    python = Path(os.environ.get(VARIABLE, ROOT / ".venv-tensorflow" / "bin" / "python"))
    if not python.exists():
        refuse = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        refuse(f"{python} does not exist: scripts/test.sh makes .venv-tensorflow")
    monkeypatch.setenv(VARIABLE, str(python))
    return python
