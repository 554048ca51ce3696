"""The benchmark of FP8: its models and engines, without a GPU."""

from pathlib import Path

import cuda_double
import numpy as np
import pytest

from device.runtime.cuda import driver as cuda_driver
from scripts import bench_float8
from scripts.networks.convnext import convnext_tiny
from scripts.networks.graph import Net, dims
from scripts.networks.transformers import vit_base

pytest.importorskip("triton", reason="Triton is not installed")


def small(batch: int) -> object:
    net = Net("small", (batch, 32, 8, 8))
    x = net.relu(net.conv(net.image, 48, 3, bias=True))
    x = net.conv(net.conv(x, 48, 3, group=48), 32, 1)
    return net.model(net.linear(net.flatten(net.mean(x)), 24))


@pytest.mark.slow
def test_a_row_has_times_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_float8, "SUBJECTS", {"small": small})
    monkeypatch.setattr("toolkit.engine.frontend.no_gain_of_float8", lambda *_: {})
    monkeypatch.setattr(bench_float8, "WARM_UP", 1)
    monkeypatch.setattr(bench_float8, "RUNS", 2)
    bench_float8.make_models(tmp_path, "small", 1)
    with cuda_double.interpreted_cubins():
        reports = [bench_float8.build(tmp_path, "small", form) for form in ("fp16", "bf16", "fp8")]
    assert "3 of 3 products" in reports[-1]
    monkeypatch.setitem(cuda_double._ATTRIBUTES, cuda_driver.COMPUTE_MAJOR, 9)
    monkeypatch.setitem(cuda_double._ATTRIBUTES, cuda_driver.COMPUTE_MINOR, 0)
    with cuda_double.installed():
        row = bench_float8.compare(tmp_path, "small", 1).split("|")
        bfloat16 = bench_float8.compare(tmp_path, "small", 1, "bf16").split("|")
    assert 4 < float(bfloat16[6]) / float(bfloat16[5]) < 16  # of steps 8 times as large
    assert row[1].strip() == "small"
    assert float(row[5]) < 1e-2 < 10 * float(row[6])


def test_the_networks_have_their_sizes() -> None:
    for model, count in ((vit_base(224, 1), 86.6e6), (convnext_tiny(1), 28.6e6)):
        weights = (value for value in model.graph.initializers.values() if len(dims(value)))
        assert sum(int(np.prod(dims(value))) for value in weights) == pytest.approx(count, rel=1e-3)
