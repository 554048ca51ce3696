"""INT8 of NudeNet, a detector with trained weights: photographs, FP32 against what INT8 loses."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from foreign_models import BY_NAME, foreign_model

import configs
from pipelines.vision import cv2
from toolkit.engine.build import BuildOptions, build_engine
from toolkit.errors import BuildError
from toolkit.graph.passes import run_passes
from toolkit.importers.onnx import import_model
from toolkit.quantize.loss.judge import judge
from toolkit.quantize.loss.metrics import DETECTION_DROP
from toolkit.quantize.loss.parts import split_outputs
from toolkit.quantize.ranges.measure import RangeOptions, Ranges, measure_ranges
from toolkit.quantize.trials.trial import TrialModel

SIZE = 320
PICTURES = ("astronaut", "camera", "clock", "chelsea")
Samples = list[dict[str, np.ndarray]]


def crops(count: int, rng: np.random.Generator) -> Samples:
    """Squares of 40 to 100 % of the photographs in turn, RGB [1, 3, 320, 320], 0 to 1."""
    folder = configs.ROOT / "scenes" / "backgrounds"
    pictures = [cv2.imread(str(folder / f"{name}.jpg"))[:, :, ::-1] for name in PICTURES]
    samples = []
    for number in range(count):
        picture = pictures[number % len(pictures)]
        side = int(rng.uniform(0.4, 1.0) * min(picture.shape[:2]))
        top, left = (int(rng.integers(length - side + 1)) for length in picture.shape[:2])
        crop = np.ascontiguousarray(picture[top : top + side, left : left + side])
        resized = cv2.resize(crop, (SIZE, SIZE), interpolation=cv2.INTER_AREA)
        blob = resized.astype(np.float32).transpose(2, 0, 1)[None] / 255
        samples.append({"images": np.ascontiguousarray(blob)})
    return samples


@dataclass(frozen=True)
class Detector:
    """NudeNet, and what it detects in photographs that no range has seen."""

    graph: ir.Model
    sha256: str
    plain: TrialModel
    unseen: Samples

    def measure(self, data: Samples, options: RangeOptions) -> Ranges:
        return measure_ranges(self.graph, data, self.sha256, options, lambda step, share: None)

    def drop(self, ranges: Ranges) -> float:
        """The largest drop of a detection's score."""
        parts, fit = self.plain.parts, ranges.fit
        floating = frozenset(self.plain.nodes)
        exact = [split_outputs(parts, self.plain({}, one, floating)) for one in self.unseen]
        actual = [
            split_outputs(parts, fit.trial(fit.ranges, one, fit.keep_float)) for one in self.unseen
        ]
        losses = judge(parts, exact, actual, basis="held out").losses
        (drop,) = [loss for loss in losses if loss.metric is DETECTION_DROP]
        assert drop.of >= 5
        return drop.value


@pytest.fixture
def nudenet() -> Path:
    return foreign_model("nudenet-320n")


def detector(path: Path, unseen: Samples) -> Detector:
    imported = import_model(path, shapes=BY_NAME["nudenet-320n"].shapes)
    graph, _ = run_passes(imported.model)
    return Detector(graph, imported.sha256, TrialModel(graph), unseen)


def test_ranges_that_clip_scores_make_no_engine(nudenet: Path, tmp_path: Path) -> None:
    data = crops(8, np.random.default_rng(4))
    options = BuildOptions(
        data=data,
        ranges=RangeOptions("percentile:99"),
        shapes=BY_NAME["nudenet-320n"].shapes,
    )
    with pytest.raises(BuildError, match=r"INT8 loses too much of .*320n.*drop of a detection"):
        build_engine(nudenet, "laptop", tmp_path / "m.engine", options)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_default_keeps_detections_within_0_05_on_other_pictures(nudenet: Path) -> None:
    rng = np.random.default_rng(1)
    data, unseen = crops(12, rng), crops(16, rng)
    subject = detector(nudenet, unseen)
    default = subject.measure(data, RangeOptions())
    widest = subject.measure(data, RangeOptions("minmax"))
    assert default.judgement.spent <= widest.judgement.spent
    assert not default.judgement.broken
    assert subject.drop(default) <= 0.05 < subject.drop(widest)
