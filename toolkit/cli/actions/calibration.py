"""The options of a calibration as values of the library."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click

from calibration.budget import parse_budget
from pipelines.config import ModelConfig, load_labels, load_model
from toolkit.cli.options.calibration import CalibrationOptions, PreprocessOptions
from toolkit.quantize.preprocess.decide import StatedPreprocessing, as_stated
from toolkit.quantize.preprocess.presets import PRESETS
from toolkit.quantize.ranges.measure import RangeOptions
from toolkit.quantize.trials.keep import MOST_FLOAT
from toolkit.workers import Workers, open_workers


def workers_of(options: CalibrationOptions) -> AbstractContextManager[Workers | None]:
    """Return the workers that were asked for; they start when there is work."""
    return nullcontext() if options.workers is None else open_workers(options.workers)


def range_options(options: CalibrationOptions, workers: Workers | None = None) -> RangeOptions:
    """Return the options; the decoder and the labels come from the model file.

    Raises click.BadParameter or TandemError: a name or a file is not known.
    """
    stated, model = stated_preprocessing(options.preprocess)
    keep, budget = options.keep, options.budget
    most_float = keep.most_float if keep is not None else None
    labels: tuple[str, ...] = ()
    if model is not None:
        labels = load_labels(Path(str(options.preprocess.preprocess)).parent / model.labels)
    return RangeOptions(
        method=options.method,
        samples=options.samples,
        preprocess=stated,
        budget=parse_budget(budget) if budget else None,
        keep=keep.keep if keep is not None else None,
        most_float=MOST_FLOAT if most_float is None else most_float,
        resume=options.resume,
        workers=workers,
        detector=model,
        labels=labels,
        equalise=options.equalise,
        round_weights=options.round_weights,
        correct_biases=options.bias_correction,
        keep_float=frozenset(options.keep_float),
    )


def stated_preprocessing(
    options: PreprocessOptions,
) -> tuple[StatedPreprocessing, ModelConfig | None]:
    """Return what the command line says of the preprocessing, and the model file that it names."""
    names = ("mean", "std", "scale", "color", "layout", "interpolation")
    values: dict[str, Any] = {
        name: value for name in names if (value := getattr(options, name)) is not None
    }
    values |= options.resize or {}
    name = options.preprocess
    if name is None:
        return StatedPreprocessing(values=values, strict=options.strict), None
    origin = f"--preprocess {name}"
    if name in PRESETS:
        return StatedPreprocessing(PRESETS[name].values, origin, values, options.strict), None
    path = Path(name)
    if not path.suffix and not path.exists():
        raise click.BadParameter(
            f"{name!r} is no file and none of {', '.join(PRESETS)}", param_hint="--preprocess"
        )
    model = load_model(path)
    return StatedPreprocessing(
        as_stated(model.preprocess).base, origin, values, options.strict
    ), model
