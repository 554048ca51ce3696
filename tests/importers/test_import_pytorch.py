"""PyTorch models: engines compute what torch computes; files that could run code are refused."""

import contextlib
import os
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from import_page import TEXT, run_command_of_page
from torch_networks import NETWORKS, Scaled, network

import tandem
from toolkit.cli.main import tandem as command_line

pytestmark = pytest.mark.usefixtures("quick_torch_export")
ROOT = Path(__file__).parents[2]
FP32_ERROR = 1e-4  # of the largest output
SHAPES = (torch.randn(2, 6), torch.randn(2, 3))


def agree(engine: Path, module: torch.nn.Module, *inputs: torch.Tensor) -> None:
    """The engine's output is torch's, on the inputs in the order of `forward`."""
    with torch.no_grad():
        expected = module(*inputs).numpy()
    with tandem.open_session(engine) as session:
        named = {spec.name: x.numpy() for spec, x in zip(session.inputs, inputs, strict=True)}
        (output,) = session.infer(named).values()
    assert np.abs(output - expected).max() <= FP32_ERROR * np.abs(expected).max()


def saved(module: torch.nn.Module, path: Path, *inputs: torch.Tensor) -> Path:
    torch.export.save(torch.export.export(module, inputs), path)
    return path


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "mobilenet_v3")) for name in NETWORKS],
)
def test_a_network_as_module_and_as_pt2_computes_what_torch_computes(
    name: str, tmp_path: Path
) -> None:
    module, x = network(name)
    agree(tandem.build(module, (x,), out=tmp_path / "module.engine").path, module, x)
    program = saved(module, tmp_path / "net.pt2", x)
    agree(tandem.build(program).path, module, x)


def test_a_module_with_two_inputs_keeps_their_names(tmp_path: Path) -> None:
    module = Scaled().eval()
    result = tandem.build(module, SHAPES, out=tmp_path / "scaled.engine")
    assert result.manifest.inputs == ("features", "gain")
    agree(result.path, module, *SHAPES)


def test_a_program_in_memory_and_a_named_model_build_and_plan(tmp_path: Path) -> None:
    module = Scaled().eval()
    program = torch.export.export(module, SHAPES)
    agree(tandem.build(program, out=tmp_path / "program.engine").path, module, *SHAPES)
    plan = tandem.plan(tandem.TorchModel(module, SHAPES, name="scaled"), profile="agx-orin-64gb")
    assert plan.name == "scaled"


def test_a_dynamic_batch_stays_dynamic(tmp_path: Path) -> None:
    module, batch = Scaled().eval(), torch.export.Dim("batch", min=1, max=8)
    model = tandem.TorchModel(module, SHAPES, ({0: batch}, {0: batch}))
    dims = (tandem.DimRange(name="batch", min=1, opt=2, max=8),)
    options = tandem.BuildOptions(dims=dims)
    result = tandem.build(model, tmp_path / "dynamic.engine", options=options)
    agree(result.path, module, torch.randn(5, 6), torch.randn(5, 3))


def test_the_command_line_builds_a_pt2_and_says_who_exported_it(tmp_path: Path) -> None:
    module = Scaled().eval()
    saved(module, tmp_path / "model.pt2", *SHAPES)
    engine, report = run_command_of_page("model.pt2", tmp_path)
    assert f"exported to ONNX by PyTorch {torch.__version__}" in report
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.engine", "model.pt2"]
    agree(engine, module, *SHAPES)


def test_infer_inspect_and_compare_take_a_pt2(tmp_path: Path) -> None:
    module, path = Scaled().eval(), tmp_path / "model.pt2"
    saved(module, path, *SHAPES)
    np.savez(tmp_path / "x.npz", features=SHAPES[0].numpy(), gain=SHAPES[1].numpy())
    arrays = ["--input", str(tmp_path / "x.npz")]
    engine = str(tandem.build(path).path)
    for command in (
        ["infer", str(path), *arrays],
        ["inspect", str(path)],
        ["compare", str(path), engine, *arrays],
    ):
        done = CliRunner().invoke(command_line, command)
        assert done.exit_code == 0, (command, done.output, done.exception)


def test_the_python_examples_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec("\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)), {})
    assert (tmp_path / "net.engine").exists()


def test_a_pickle_is_refused_and_the_lines_that_it_says_make_a_pt2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "best.pt"
    torch.save(Scaled().state_dict(), path)
    with pytest.raises(tandem.TandemError, match="run any code") as refused:
        tandem.build(path)
    lines = "\n".join(line.strip() for line in str(refused.value).split("\n")[1:])
    code = f"import torch\nmodule = torch.nn.Conv2d(3, 2, 3)\n{lines}"
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert tandem.build(tmp_path / "best.pt2").path.exists()


def test_torchscript_is_refused(tmp_path: Path) -> None:
    torch.jit.trace(Scaled().eval(), SHAPES).save(tmp_path / "best.pt")
    with pytest.raises(tandem.TandemError, match="is TorchScript"):
        tandem.build(tmp_path / "best.pt")


class Touch:
    """A pickle that writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "part",
    [
        "sample_inputs/model.pt",
        "constants/custom_obj_0",
        "constants/opaque_obj_/0",  # torch looks at the beginning of the path
        "aotinductor/model/net.so",
        "aotinductor/model/net.cpp",  # compiled where there is no library
    ],
)
def test_a_pt2_that_would_run_code_is_refused_unread(part: str, tmp_path: Path) -> None:
    plain, hostile = saved(Scaled().eval(), tmp_path / "a.pt2", *SHAPES), tmp_path / "b.pt2"
    payload = tmp_path / "payload"
    torch.save(Touch(tmp_path / "was here"), payload)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(hostile, "w") as new:
        for name in old.namelist():
            if not name.endswith(part):
                new.writestr(name, old.read(name))
        new.writestr(f"{old.namelist()[0].partition('/')[0]}/data/{part}", payload.read_bytes())
    with pytest.raises(tandem.TandemError, match=f"{part}.*could run any code"):
        tandem.build(hostile)
    assert not (tmp_path / "was here").exists()
    if part.startswith("sample_inputs"):
        with contextlib.suppress(Exception):  # what follows the pickle
            torch.export.load(hostile)
        assert (tmp_path / "was here").exists()  # what the refusal is for


def test_a_pt2_of_the_old_format_is_refused_unread(tmp_path: Path) -> None:
    hostile = saved(Scaled().eval(), tmp_path / "net.pt2", *SHAPES)
    with zipfile.ZipFile(hostile, "a") as archive:
        archive.writestr("version", "8.20")
        archive.writestr("serialized_state_dict.pt", pickle.dumps(Touch(tmp_path / "was here")))
    with pytest.raises(tandem.TandemError, match="format of PyTorch"):
        tandem.build(hostile)
    assert not (tmp_path / "was here").exists()


def test_a_config_that_asks_for_a_pickle_is_refused(tmp_path: Path) -> None:
    plain, hostile = saved(Scaled().eval(), tmp_path / "a.pt2", *SHAPES), tmp_path / "b.pt2"
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(hostile, "w") as new:
        for name in old.namelist():
            data = old.read(name).replace(b'"use_pickle": false', b'"use_pickle": true')
            is_weight = name.endswith("weights/weight_0")
            new.writestr(name, pickle.dumps(Touch(tmp_path / "was here")) if is_weight else data)
    with pytest.raises(tandem.TandemError, match="could run any code"):
        tandem.build(hostile)
    assert not (tmp_path / "was here").exists()


def test_a_damaged_pt2_is_refused(tmp_path: Path) -> None:
    path = saved(Scaled().eval(), tmp_path / "net.pt2", *SHAPES)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(tandem.TandemError, match=r"net\.pt2 is not a complete file"):
        tandem.build(path)


def test_a_model_in_training_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tandem.TandemError, match=r"training mode.*call \.eval\(\)"):
        tandem.build(Scaled().train(), SHAPES)
    path = saved(Scaled().train(), tmp_path / "net.pt2", *SHAPES)
    with pytest.raises(tandem.TandemError, match="exported in training mode"):
        tandem.build(path)


def test_example_inputs_are_asked_for_and_belong_to_modules_alone() -> None:
    with pytest.raises(tandem.TandemError, match="has no example inputs"):
        tandem.build(Scaled().eval())
    with pytest.raises(tandem.TandemError, match="belong to a PyTorch module"):
        tandem.build("model.onnx", SHAPES)


class Solved(torch.nn.Module):
    """An operator that ONNX does not have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [3, 3] -> [3]."""
        return torch.linalg.eigvalsh(x)


def test_what_cannot_be_exported_is_named_and_the_log_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "solved.engine"
    with pytest.raises(
        tandem.TandemError, match=r"solved cannot be exported.*eigh.*log"
    ) as refused:
        tandem.build(Solved().eval(), (torch.eye(3),), out=out)
    log = Path(str(refused.value).rpartition(" is in ")[2].rstrip("."))
    assert "Traceback" in log.read_text()
    log.unlink()
    assert not out.exists()
