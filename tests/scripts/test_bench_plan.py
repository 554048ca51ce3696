"""The benchmark of plans measures the command on a file."""

from pathlib import Path

import numpy as np
import pytest
from model_fixtures import small_convnet

from scripts import bench_plan


def test_what_a_plan_takes_is_measured(
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = small_convnet(tmp_path / "convnet.onnx", rng)
    monkeypatch.setattr("sys.argv", ["bench_plan", str(path)])
    bench_plan.main()
    name, user, _, _, system, *_, peak, unit = capsys.readouterr().out.split()
    assert (name, unit) == ("convnet", "MB")
    assert float(user) > 0
    assert float(system) >= 0
    assert float(peak) > 50
