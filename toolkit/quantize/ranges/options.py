"""How ranges are found: the options of a calibration."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from calibration.budget import Budget
from device.engine.preprocessing import Preprocessing
from pipelines.config import ModelConfig
from toolkit.importers.onnx import ImportedModel
from toolkit.quantize.corrections.corrections import Switch
from toolkit.quantize.preprocess.decide import StatedPreprocessing
from toolkit.quantize.preprocess.known import Hint, known_preprocessing
from toolkit.quantize.ranges.first_layer import FirstLayer, first_layer
from toolkit.quantize.trials.keep import MOST_FLOAT
from toolkit.workers import Workers

AUTO = "auto"

Keep = Literal["auto", "none"]


@dataclass(frozen=True, slots=True)
class RangeOptions:
    """How ranges are found.

    `method`: a row of METHODS, with a parameter after a colon where it takes one, or "auto".
    `samples`: how many are used, None: all. `preprocess`: image -> input, as far as the user says;
    `suggested`: what the model's file says of it (`toolkit.quantize.preprocess`).
    `first_layer`: of the imported model; the inputs are compared with it.
    `detector` and its labels let a budget measure mAP50 on the scenes that ship with Tandem.
    `workers`: who observes the samples in shards (`toolkit.quantize.ranges.shards`), and `states`:
    files of shards that are observed already; both give the result of one process.
    `resume`: checkpoint file of the observation (see `calibration.calibrate`).
    `equalise`, `round_weights` and `correct_biases`: corrections of weights
    (`toolkit.quantize.corrections`); weights are rounded where an output misses its target.
    None: "auto" (by measured benefit) if a search runs anyway (method "auto", a budget), else
    "off".
    `keep`: whether the nodes whose INT8 costs most stay in floating point where an output has
    scores or misses its target (`toolkit.quantize.trials.keep`), with at most `most_float` of the
    multiplications.
    None: "auto" with method "auto", else "none"; a budget replaces it.
    `keep_float`: nodes that stay in floating point whatever a budget says.
    `on_gpu`: all nodes run on a GPU, and INT8 error is measured with the operands that it reads in
    INT8 (`toolkit.quantize.gpu_operands`).
    """

    method: str = AUTO
    samples: int | None = None
    preprocess: StatedPreprocessing | Preprocessing | None = None
    suggested: Hint | None = None
    first_layer: FirstLayer | None = field(default=None, repr=False)
    budget: Budget | None = None
    resume: Path | None = None
    detector: ModelConfig | None = None
    labels: tuple[str, ...] = ()
    equalise: Switch | None = None
    correct_biases: Switch | None = None
    round_weights: Switch | None = None
    keep: Keep | None = None
    most_float: float = MOST_FLOAT
    keep_float: frozenset[str] = frozenset()
    on_gpu: bool = False
    workers: Workers | None = field(default=None, repr=False)
    states: tuple[Path, ...] = ()

    @property
    def search(self) -> bool:
        """True if trials on held-out samples choose anything."""
        return self.method == AUTO or self.budget is not None or self.keep == "auto"

    @property
    def keeps(self) -> bool:
        """True if nodes may stay in floating point unasked."""
        keep = self.keep or ("auto" if self.method == AUTO else "none")
        return keep == "auto" and self.budget is None

    def switch(self, correction: Switch | None) -> Switch:
        """A correction as requested, or its default."""
        return correction or ("auto" if self.search else "off")


def with_model(options: RangeOptions, imported: ImportedModel) -> RangeOptions:
    """Return the options with what the model's file says about its images."""
    return replace(
        options,
        suggested=known_preprocessing(imported.name, imported.origin),
        first_layer=first_layer(imported.model),
    )
