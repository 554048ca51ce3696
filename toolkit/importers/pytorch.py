"""PyTorch -> ONNX: programs of torch.export (.pt2), and modules with example inputs.

torch and onnx are imported when such a model is given. The exporter of torch (onnxscript's) makes
the ONNX file, with the names of the inputs of `forward`.
"""

import io
import traceback
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn

from device.install_advice import pip_install
from toolkit.errors import ImportModelError, first_line
from toolkit.importers.pt2.archive import refuse_code
from toolkit.importers.source import Exported, ModelPath, keep_log
from toolkit.progress import Progress

if TYPE_CHECKING:
    import torch

TRAINING_ARGUMENTS = ("train", "training")
HOW_TO_MAKE_PT2 = """
    module.eval()
    program = torch.export.export(module, (torch.rand(1, 3, 224, 224),))
    torch.export.save(program, "{stem}.pt2")"""


@dataclass(frozen=True, slots=True)
class TorchModel:
    """A PyTorch network in memory.

    `module`: a module in evaluation mode, or what `torch.export.export` returns, which needs no
    `example_inputs`. `example_inputs`: the arguments of `forward`; their shapes become those of the
    inputs, but for dimensions in `dynamic_shapes` (as in `torch.export.export`). `name`: what
    messages and the engine call the model; None is the name of the module's class.
    """

    module: "torch.nn.Module | torch.export.ExportedProgram"
    example_inputs: tuple[Any, ...] = ()
    dynamic_shapes: Any = None
    name: str | None = None

    @property
    def title(self) -> str:
        """The name of the model."""
        return self.name or type(self.module).__name__.lower()


def is_torch(model: object) -> bool:
    """Whether a value is a module or a program of PyTorch; torch is not imported for it."""
    names = {f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__}
    programs = {"torch.nn.modules.module.Module", "torch.export.exported_program.ExportedProgram"}
    return bool(names & programs)


def export_module(model: TorchModel) -> Exported:
    """Export a module or a program in memory.

    Raises ImportModelError: it is in training mode, lacks example inputs, or cannot be exported.
    """
    torch = import_torch(model.title)
    if isinstance(model.module, torch.export.ExportedProgram):
        return _to_onnx(model.module, (), model.title)
    if isinstance(model.module, torch.jit.ScriptModule):
        raise ImportModelError(
            f"{model.title} is TorchScript, which torch.export does not take; give the module that "
            "it was made of."
        )
    if model.module.training:
        raise ImportModelError(
            f"{model.title} is in training mode, in which batch normalization and dropout compute "
            "otherwise; call .eval() on it first."
        )
    if not model.example_inputs:
        raise ImportModelError(
            f"{model.title} has no example inputs, and their shapes become those of the engine; "
            "give them: tandem.TorchModel(module, (torch.rand(1, 3, 224, 224),))."
        )
    return _to_onnx(model.module, model.example_inputs, model.title, model.dynamic_shapes)


def export_pt2(file: ModelPath, report: Progress) -> Exported:
    """Export a file of torch.export.save.

    Raises ImportModelError: it is damaged, could run code of its own, or cannot be exported.
    """
    name = file.path.name
    report("load PyTorch", 0.0)
    torch = import_torch(name)
    _register_quantization()
    report("read the program", 0.2)
    refuse_code(file.path, torch)
    with _quiet(name, "cannot be read as a program of torch.export") as log, redirect_stdout(log):
        program = torch.export.load(file.path)
    report("export to ONNX", 0.4)
    return _to_onnx(program, (), name)


def _register_quantization() -> None:
    """Register the operators `quantized_decomposed`, with which PT2E quantizes programs.

    PyTorch reads no file that has them before. A version that leaves them out refuses it by name.
    """
    with suppress(ImportError):
        import_module("torch.ao.quantization.fx._decomposed")


def refuse_pickle(file: ModelPath, report: Progress) -> NoReturn:
    """Refuse a .pt or .pth file: say what it holds, and how to make a .pt2 of it."""
    try:
        with zipfile.ZipFile(file.path) as archive:
            script = any(name.partition("/")[2].startswith("code/") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):  # older files are bare pickles
        script = False
    what = (
        "is TorchScript, which PyTorch has given up and its ONNX exporter does not take"
        if script
        else "is a pickle, and reading one can run any code in it"
    )
    raise ImportModelError(
        f"{file.path.name} {what}; where you trust it, load it in Python and make a .pt2 of it "
        f"(or give the module to tandem.build):{HOW_TO_MAKE_PT2.format(stem=file.path.stem)}"
    )


def import_torch(name: str) -> Any:  # noqa: ANN401  (a module)
    """Return the package torch. Raises ImportModelError naming the model: it is not installed."""
    try:
        import torch
    except ImportError as err:
        raise ImportModelError(
            f"{name} is a PyTorch model, and PyTorch cannot be imported ({first_line(err)}); "
            f"{pip_install('torch')}."
        ) from err
    return torch


def _to_onnx(
    module: Any,  # noqa: ANN401  (a module or a program)
    example_inputs: tuple[Any, ...],
    name: str,
    dynamic_shapes: Any = None,  # noqa: ANN401  (torch's)
) -> Exported:
    import onnx_ir as ir
    from onnx_ir.passes import common as ir_passes

    torch = import_torch(name)
    if isinstance(module, torch.export.ExportedProgram):
        _refuse_training(module, name)
    with _quiet(name, "cannot be exported to ONNX") as log, redirect_stdout(log):
        program = torch.onnx.export(
            module,
            example_inputs,
            dynamo=True,
            dynamic_shapes=dynamic_shapes,
            verbose=False,
        )
        # Metadata name the source files of the network, which do not belong in an engine.
        model = ir_passes.ClearMetadataAndDocStringPass()(program.model).model
        data = ir.to_proto(model).SerializeToString(deterministic=True)
    return Exported(data, (f"exported to ONNX by PyTorch {torch.__version__}",))


def _refuse_training(program: "torch.export.ExportedProgram", name: str) -> None:
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for argument, value in zip(schema.arguments if schema else (), node.args, strict=False):
            if argument.name in TRAINING_ARGUMENTS and value is True:
                raise ImportModelError(
                    f"{name} was exported in training mode ({node.name!r} trains), in which it "
                    "computes otherwise; call .eval() on the module and export it again."
                )


@contextmanager
def _quiet(name: str, what: str) -> Iterator[io.StringIO]:
    """Collect what an exporter prints; its error becomes an ImportModelError that names the log."""
    log = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stderr(log):
            warnings.simplefilter("ignore")
            yield log
    except Exception as err:
        log.write(traceback.format_exc())
        path = keep_log(name, log.getvalue())
        raise ImportModelError(
            f"{name} {what}: {first_line(_cause(err))}; the whole log is in {path}."
        ) from err


def _cause(err: BaseException) -> BaseException:
    """Return the first of the errors that led to this one; exporters wrap theirs."""
    while err.__cause__ is not None:
        err = err.__cause__
    return err
