"""A model, its INT8 ranges and a profile -> a PyTorch network with the engine's INT8 arithmetic."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from calibration.table import CalibrationTable
from device.argument_names import naming_arguments
from toolkit.engine.argument_names import BUILD
from toolkit.engine.build import BuildOptions, plan_engine
from toolkit.engine.target import choose_target
from toolkit.errors import BuildError, about
from toolkit.importers.onnx import ModelSource, source_path
from toolkit.importers.pytorch import import_torch
from toolkit.progress import silent

if TYPE_CHECKING:
    from toolkit.finetune.trainable_network import FakeQuantized


def fake_quantized(
    source: ModelSource,
    table: CalibrationTable,
    profile: str,
    options: BuildOptions,
    parameters: frozenset[str] = frozenset(),
) -> "FakeQuantized":
    """Return the network that `tandem.fake_quantize` describes.

    `parameters`: constants of the model to train beside the weights and biases of layers.

    Raises TandemError: PyTorch is missing, or the graph has an operator without a gradient.
    """
    import_torch(source_path(source).name)
    from toolkit.finetune.trainable_network import FakeQuantized

    if options.plan.max_latency_ms is not None or options.dims:
        raise BuildError(
            "fine-tuning needs one size for each input, but the options leave it open: leave out "
            "max_latency_ms and dims."
        )
    options = replace(options, precision="int8", table=table, data=None, accept_loss=True)
    with naming_arguments(BUILD), about(source_path(source).name):
        planned = plan_engine(source, choose_target(profile, options.jetpack), options, silent)
        return FakeQuantized(planned, parameters)


def parameter_names(module: Any) -> frozenset[str]:  # noqa: ANN401  (a module or a program)
    """Return the names of what a PyTorch module trains."""
    return frozenset(name for name, _ in module.named_parameters())
