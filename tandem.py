"""Tandem's public Python API.

    import tandem

    result = tandem.build("model.onnx", profile="agx-orin-64gb", calibration="images/")
    print(result.report)
    with tandem.open_session(result.path) as session:
        outputs = session.infer({"images": array})

On the host:
    build           model (ONNX, PyTorch, TensorFlow, Keras) -> engine file; `BuildOptions`,
                    `RangeOptions`, `PlanOptions`, `DimRange`; `TorchModel`, `ModelPath`
    plan            what runs where, why, and how fast, without a board; `plan_text` shows it
    calibrate       data -> INT8 ranges; `read_table` and `write_table` keep them
    fake_quantize   a model in PyTorch with the arithmetic of its INT8 engine, for fine-tuning
    Network         a model made layer by layer, as with TensorRT's network definition API;
                    `ActivationType`, `PoolingType` ... are its operations
    load_plugins    custom operators of a file
On the board and on the host:
    open_session    an engine, ready to run, on the CPU's arrays or (`DeviceArray`) the GPU's;
                    `SessionPool`: on several frames at the same time
    run_pipeline    camera to detections: the pipeline of a bundle; `Pipeline` gives its results
                     one by one
    load_model, load_labels, read_image, preprocess, decode, view_of
                    the steps of a pipeline one by one, as a model file describes them
Modules, also as `from tandem.fleet import Client`:
    plugins         `Plugin` and its parts, for the file of a custom operator
    fleet           `Client`, the API of `tandem fleet web`
    dla             the integer arithmetic of the DLA

Every error that a caller can cause is a `TandemError`. A name is imported when it is first used: on
a board, without onnx, `open_session` and `run_pipeline` work, and the host's names raise
ModuleNotFoundError.
"""

import sys
import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calibration.table import CalibrationTable, read_table, write_table
    from device.dla_emulator.arithmetic import library as dla
    from device.errors import TandemError
    from device.session import DeviceArray, Session, SessionPool, open_session
    from pipelines.config import PreprocessConfig, load_labels, load_model
    from pipelines.results import Detections
    from pipelines.run import Broker, FrameResult, Pipeline, run_pipeline
    from pipelines.sources.files import read_image
    from pipelines.stages.decode import decode, view_of
    from pipelines.stages.preprocess import preprocess
    from toolkit import plugins
    from toolkit.build import (
        BuildOptions,
        BuildResult,
        DimRange,
        ModelPath,
        Plan,
        PlanOptions,
        RangeOptions,
        TorchModel,
        build,
        calibrate,
        fake_quantize,
        load_plugins,
        plan,
        plan_text,
    )
    from toolkit.fleet import client as fleet
    from toolkit.network_definition import (
        ActivationType,
        ElementWiseOperation,
        GatherMode,
        InterpolationMode,
        Layer,
        MatrixOperation,
        Network,
        PaddingMode,
        PoolingType,
        ReduceOperation,
        Tensor,
        TopKOperation,
        UnaryOperation,
    )

    __version__: str

# name -> the module that has it
_MODULES = {
    "ActivationType": "toolkit.network_definition",
    "Broker": "pipelines.run",
    "BuildOptions": "toolkit.build",
    "BuildResult": "toolkit.build",
    "CalibrationTable": "calibration.table",
    "Detections": "pipelines.results",
    "DeviceArray": "device.session",
    "DimRange": "toolkit.build",
    "ElementWiseOperation": "toolkit.network_definition",
    "FrameResult": "pipelines.run",
    "GatherMode": "toolkit.network_definition",
    "InterpolationMode": "toolkit.network_definition",
    "Layer": "toolkit.network_definition",
    "MatrixOperation": "toolkit.network_definition",
    "ModelPath": "toolkit.build",
    "Network": "toolkit.network_definition",
    "PaddingMode": "toolkit.network_definition",
    "Pipeline": "pipelines.run",
    "Plan": "toolkit.build",
    "PlanOptions": "toolkit.build",
    "PoolingType": "toolkit.network_definition",
    "PreprocessConfig": "pipelines.config",
    "RangeOptions": "toolkit.build",
    "ReduceOperation": "toolkit.network_definition",
    "Session": "device.session",
    "SessionPool": "device.session",
    "TandemError": "device.errors",
    "Tensor": "toolkit.network_definition",
    "TopKOperation": "toolkit.network_definition",
    "TorchModel": "toolkit.build",
    "UnaryOperation": "toolkit.network_definition",
    "build": "toolkit.build",
    "calibrate": "toolkit.build",
    "decode": "pipelines.stages.decode",
    "fake_quantize": "toolkit.build",
    "load_labels": "pipelines.config",
    "load_model": "pipelines.config",
    "load_plugins": "toolkit.build",
    "open_session": "device.session",
    "plan": "toolkit.build",
    "plan_text": "toolkit.build",
    "preprocess": "pipelines.stages.preprocess",
    "read_image": "pipelines.sources.files",
    "read_table": "calibration.table",
    "run_pipeline": "pipelines.run",
    "view_of": "pipelines.stages.decode",
    "write_table": "calibration.table",
}

# module of the API -> the module whose names it has
_SUBMODULES = {
    "dla": "device.dla_emulator.arithmetic.library",
    "fleet": "toolkit.fleet.client",
    "plugins": "toolkit.plugins",
}

__all__ = [
    "ActivationType",
    "Broker",
    "BuildOptions",
    "BuildResult",
    "CalibrationTable",
    "Detections",
    "DeviceArray",
    "DimRange",
    "ElementWiseOperation",
    "FrameResult",
    "GatherMode",
    "InterpolationMode",
    "Layer",
    "MatrixOperation",
    "ModelPath",
    "Network",
    "PaddingMode",
    "Pipeline",
    "Plan",
    "PlanOptions",
    "PoolingType",
    "PreprocessConfig",
    "RangeOptions",
    "ReduceOperation",
    "Session",
    "SessionPool",
    "TandemError",
    "Tensor",
    "TopKOperation",
    "TorchModel",
    "UnaryOperation",
    "__version__",
    "build",
    "calibrate",
    "decode",
    "dla",
    "fake_quantize",
    "fleet",
    "load_labels",
    "load_model",
    "load_plugins",
    "open_session",
    "plan",
    "plan_text",
    "plugins",
    "preprocess",
    "read_image",
    "read_table",
    "run_pipeline",
    "view_of",
    "write_table",
]


if not TYPE_CHECKING:  # a type checker would take any name for one of this module

    def __getattr__(name: str) -> object:
        """Import a name of the API when it is first used (PEP 562)."""
        if name == "__version__":
            return version("tandem-edge")
        if name not in _MODULES:
            raise AttributeError(f"module 'tandem' has no attribute {name!r}")
        _claim_packages()
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value

    class _Submodule(ModuleType):
        """A module of the API; as os.path is, it is one of a file that is no package."""

        def __init__(self, name: str, origin: str) -> None:
            super().__init__(f"tandem.{name}")
            self._origin = origin
            sys.modules[self.__name__] = self

        def __getattr__(self, name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            _claim_packages()
            origin = import_module(self._origin)
            if name not in origin.__all__:
                raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
            value = getattr(origin, name)
            setattr(self, name, value)
            return value

    globals().update((name, _Submodule(name, origin)) for name, origin in _SUBMODULES.items())


def __dir__() -> list[str]:
    return __all__


def command() -> None:
    """Run `tandem`."""
    import_module("toolkit.cli.main").main()


def agent() -> int:
    """Run `tandem-agent`; return its exit status."""
    return int(import_module("device.agent.__main__").main())


def pipeline() -> int:
    """Run `tandem-pipeline`, the pipeline of a bundle where no agent is; return its exit status."""
    return int(import_module("pipelines.__main__").main())


@cache
def _claim_packages() -> None:
    """Let the names of Tandem's packages mean those beside this file, whatever is on sys.path.

    Raises ImportError: a module of the user's has one of the names, and was imported already.
    """
    path = Path(__file__).resolve().parent / "device" / "start" / "packages.py"
    spec = spec_from_file_location("tandem_packages", path)
    assert spec is not None
    assert spec.loader is not None
    packages = module_from_spec(spec)
    sys.modules[spec.name] = packages
    spec.loader.exec_module(packages)
    for hidden in packages.claim():
        warnings.warn(
            f"{hidden} cannot be imported in this process any more: Tandem has a package of the "
            "same name. Rename it, or use Tandem in another process.",
            stacklevel=3,
        )
