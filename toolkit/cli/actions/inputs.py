"""The options of inputs and tolerances as values of the library."""

import click

from toolkit.cli.options.inputs import InputOptions, ToleranceOptions
from toolkit.evaluate.agreement.tolerance import Tolerances
from toolkit.evaluate.infer.inputs import InputRequest


def input_request(options: InputOptions) -> InputRequest:
    """Return what to run on. Raises click.UsageError: the options contradict each other."""
    rows = (
        ("--input", options.files),
        ("--data", options.data),
        ("--random", options.seed is not None),
    )
    sources = [name for name, is_set in rows if is_set]
    if len(sources) > 1:
        raise click.UsageError(f"{' and '.join(sources)} are two sources of inputs; give one.")
    if options.ranges and (options.files or options.data):
        raise click.UsageError("--range is for random inputs; leave out --input and --data.")
    if options.preprocess and not options.data:
        raise click.UsageError("--preprocess says how pictures become inputs; give --data.")
    return InputRequest(
        options.files,
        options.data,
        options.preprocess,
        options.seed,
        options.samples,
        options.shapes,
        options.ranges,
    )


def tolerances_of(options: ToleranceOptions) -> Tolerances:
    """Return when two tensors agree."""
    return Tolerances(options.atol, options.rtol, options.min_sqnr)
