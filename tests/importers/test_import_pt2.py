"""Programs of torch.export: real ones pass; text that PyTorch would run as code is refused."""

import contextlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.export import Dim
from torch_networks import Scaled, network

import tandem
from toolkit.importers.pt2 import text
from toolkit.importers.pt2.archive import refuse_code

pytestmark = pytest.mark.usefixtures("quick_torch_export")
JSON = dict[str, Any]
ROOT = Path(__file__).parents[2]
AUTO = Dim.AUTO


class Padded(torch.nn.Module):
    """Sizes rounded up, halved, multiplied and compared."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """x [1, 3, H, W] -> padded to 32, a range, the upper half, one enlarged."""
        height, width = x.shape[-2:]
        return (
            torch.nn.functional.pad(x, (0, (-width) % 32, 0, (-height) % 32)),
            torch.arange(height * width) / width + float(height) ** 0.5,
            x[:, :, : (height + 1) // 2] if height % 2 == 0 else x,
            torch.nn.functional.interpolate(x, scale_factor=1.5),
        )


class Branches(torch.nn.Module):
    """Subgraphs, loops, regions without gradients and in BF16, sizes known from data only."""

    def forward(self, x: torch.Tensor, *, options: dict[str, torch.Tensor]) -> dict[str, Any]:
        """x [N, 4], options {"the gain": [4]} -> by name, and one under "out-1"."""
        with torch.no_grad():
            doubled = x * 2
        with torch.autocast("cpu", torch.bfloat16):
            product = torch.einsum("ij,kj->ik", doubled, x)
        _, looped = torch._higher_order_ops.while_loop(
            lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x)
        )
        chosen = torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))
        return {
            "out-1": product.float(),
            "looped": looped + chosen * options["the gain"],
            "positive": x[x > 0].sum() + x.nonzero().sum().item(),
        }


class Attention(torch.nn.Module):
    """An encoder layer, and an LSTM behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.lstm = torch.nn.LSTM(8, 3, batch_first=True)

    def forward(self, x: torch.Tensor, mode: str = "both") -> Any:
        """x [N, T, 8] -> sequence [N, T, 3] and state."""
        return self.lstm(self.layer(x)) if mode == "both" else x


def mobilenet() -> tuple[torch.nn.Module, tuple[Any, ...], JSON, Any]:
    module, x = network("mobilenet_v3")
    return module, (x.repeat(2, 1, 1, 1),), {}, ({0: Dim("batch", max=8), 2: AUTO, 3: AUTO},)


REAL: dict[str, Callable[[], tuple[torch.nn.Module, tuple[Any, ...], JSON, Any]]] = {
    "scaled": lambda: (
        Scaled(),
        (torch.randn(2, 6), torch.randn(2, 3)),
        {},
        ({0: Dim("batch", max=8)},) * 2,
    ),
    "padded": lambda: (Padded(), (torch.randn(1, 3, 50, 40),), {}, ({2: AUTO, 3: AUTO},)),
    "branches": lambda: (
        Branches(),
        (torch.randn(3, 4),),
        {"options": {"the gain": torch.randn(4)}},
        None,
    ),
    "attention": lambda: (Attention(), (torch.randn(2, 5, 8), "both"), {}, ({0: AUTO}, None)),
    "mobilenet": mobilenet,
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "mobilenet")) for name in REAL],
)
def test_a_program_that_torch_exports_passes_the_check(name: str, tmp_path: Path) -> None:
    module, args, kwargs, dynamic = REAL[name]()
    program = torch.export.export(module.eval(), args, kwargs, dynamic_shapes=dynamic)
    torch.export.save(program, tmp_path / "net.pt2")
    refuse_code(tmp_path / "net.pt2", torch)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A harmless file with a dynamic batch."""
    path = tmp_path_factory.mktemp("pt2") / "net.pt2"
    module, args, _, dynamic = REAL["scaled"]()
    torch.export.save(torch.export.export(module.eval(), args, dynamic_shapes=dynamic), path)
    return path


def test_a_program_with_dynamic_sizes_builds_under_the_names_that_torch_gives_them(
    program: Path, tmp_path: Path
) -> None:
    def build(name: str) -> tandem.BuildResult:
        dims = (tandem.DimRange(name=name, min=1, opt=2, max=8),)
        options = tandem.BuildOptions(dims=dims)
        return tandem.build(program, tmp_path / "net.engine", options=options)

    with pytest.raises(tandem.TandemError, match="no dynamic dimension 'batch'") as refused:
        build("batch")  # torch.export.save does not keep the name
    name = re.search(r"it has: (s\d+)\)", str(refused.value))[1]  # type: ignore[index]
    with tandem.open_session(build(name).path) as session:
        outputs = session.infer({"features": np.ones((5, 6), "f"), "gain": np.ones((5, 3), "f")})
    assert [array.shape for array in outputs.values()] == [(5, 3)]


def changed(plain: Path, hostile: Path, change: Callable[[JSON], None]) -> Path:
    """Copy a .pt2 with a change of its program."""
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(hostile, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("models/model.json"):
                document = json.loads(content)
                change(document)
                content = json.dumps(document).encode()
            new.writestr(name, content)
    return hostile


def graph(document: JSON) -> JSON:
    return document["graph_module"]["graph"]  # type: ignore[no-any-return]


def symbolic_size(document: JSON) -> JSON:
    sizes = (size for value in graph(document)["tensor_values"].values() for size in value["sizes"])
    return next(size["as_expr"] for size in sizes if "as_expr" in size)  # type: ignore[no-any-return]


def signature(document: JSON) -> JSON:
    return document["graph_module"]["module_call_graph"][0]["signature"]  # type: ignore[no-any-return]


def rename(document: JSON, old: str, new: str) -> None:
    renamed = json.loads(json.dumps(document).replace(json.dumps(old), json.dumps(new)))
    document.clear()
    document.update(renamed)


def mkdir(path: str) -> str:
    return f"__import__('os').mkdir({path!r})"


def tree(context: object, kind: str = "builtins.dict") -> str:
    leaf = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf]}])


ENUM = '[{"__enum__": true, "fqn": "payload:Kind", "name": "x"}]'
FACTORY = {"default_factory_module": "payload", "default_factory_name": "x", "dict_context": ["y"]}

# What is changed (given the folder that the code would make) and the field that the error names.
HOSTILE: dict[str, tuple[Callable[[JSON, str], Any], str]] = {
    "expression": (
        lambda d, out: symbolic_size(d).update(expr_str=mkdir(out)),
        r"\.sizes\[0\]\.as_expr\.expr_str",
    ),
    "expression_of_attributes": (
        lambda d, out: symbolic_size(d).update(expr_str="Symbol('s0').__class__.__base__"),
        r"as_expr\.expr_str",
    ),
    "guard": (lambda d, out: d.update(guards_code=[mkdir(out)]), r"guards_code\[0\]"),
    "target": (
        lambda d, out: graph(d)["nodes"][-1].update(target="torch.os.mkdir"),
        r"nodes\[\d+\]\.target",
    ),
    "target_of_files": (
        lambda d, out: graph(d)["nodes"][-1].update(target="torch.ops.aten.from_file.default"),
        r"nodes\[\d+\]\.target",
    ),
    "target_of_torchscript": (
        lambda d, out: graph(d)["nodes"][-1].update(target="torch.ops.aten.save.default"),
        r"nodes\[\d+\]\.target",
    ),
    "operator": (
        lambda d, out: graph(d)["nodes"][-1]["inputs"][0].update(arg={"as_operator": "torch.load"}),
        r"inputs\[0\]\.arg\.as_operator",
    ),
    "source": (
        lambda d, out: graph(d)["nodes"][-1]["metadata"].update(source_fn_stack="x,#a:b"),
        r"metadata\.source_fn_stack",
    ),
    "name": (
        lambda d, out: rename(d, "gain", f"gain={mkdir(out)}"),
        r"name",
    ),
    "key": (
        lambda d, out: graph(d)["sym_int_values"].update({mkdir(out): {"as_int": 1}}),
        r"sym_int_values",
    ),
    "parameter": (
        lambda d, out: rename(d, "linear.bias", f'linear.bias", {mkdir(out)}, "'),
        r"parameter_name",
    ),
    "argument": (
        lambda d, out: signature(d).update(forward_arg_names=[f"features={mkdir(out)}", "gain"]),
        r"forward_arg_names\[0\]",
    ),
    "constant": (
        lambda d, out: d["graph_module"]["signature"]["input_specs"][-1].update(
            constant_input={"name": "x", "value": {"as_string": f"' + {mkdir(out)} + '"}}
        ),
        r"constant_input\.value\.as_string",
    ),
    "tree_of_enumerations": (lambda d, out: signature(d).update(in_spec=tree(ENUM)), "in_spec"),
    "tree_of_factories": (
        lambda d, out: signature(d).update(out_spec=tree(FACTORY, "collections.defaultdict")),
        "out_spec",
    ),
    "tree_of_arguments": (
        lambda d, out: signature(d).update(in_spec=tree(json.dumps([f"x={mkdir(out)}"]))),
        "in_spec",
    ),
    "range": (
        lambda d, out: d["range_constraints"].update(u99999999999={"min_val": 0, "max_val": 1}),
        "range_constraints",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_text_that_torch_could_run_is_refused_with_file_field_and_value(
    name: str, program: Path, tmp_path: Path
) -> None:
    change, field = HOSTILE[name]
    out = tmp_path / "was here"
    hostile = changed(program, tmp_path / "b.pt2", lambda document: change(document, str(out)))
    with pytest.raises(
        tandem.TandemError, match=rf"^b\.pt2: .*{field} in 'models/model\.json' is .*could run it"
    ):
        tandem.build(hostile)
    assert not out.exists()


@pytest.mark.parametrize(
    "name", ["expression", "guard", "name", "tree_of_enumerations", "tree_of_factories"]
)
def test_torch_itself_runs_what_is_refused(
    name: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, _ = HOSTILE[name]
    out = tmp_path / "was here"
    hostile = changed(program, tmp_path / "b.pt2", lambda document: change(document, str(out)))
    (tmp_path / "payload.py").write_text(f"import os\nos.mkdir({str(out)!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "payload", raising=False)
    with contextlib.suppress(Exception):  # what follows the code
        torch.export.load(hostile).module()(torch.randn(2, 6), torch.randn(2, 3))
    assert out.exists()  # what the refusal is for


EXPRESSIONS = {
    "Mul(Integer(4), Symbol('s77', positive=True, integer=True))": True,
    "Max(Integer(1), TruncToInt(Mul(Float('1.5', precision=53), ToFloat(Symbol('s77')))))": True,
    "s0*2 + Mod(s1, 3)": True,
    "Pow(Symbol('s0'), Integer(64))": True,
    "Pow(Symbol('s0'), Integer(65))": False,
    "2**64": True,
    "2**65": False,
    "Pow(9, Pow(9, Integer(9)))": False,
    "Symbol('exit()')": False,
    "Lambda(s0, s0)": False,
    "exit": False,
    "s0.args": False,
    "(lambda: s0)()": False,
    "[s0 for s0 in (1,)]": False,
    "f'{s0}'": False,
    "1 +" + " 1 +" * 5000 + " 1": False,  # longer than the limit
    "(s0 ** 8) ** 8": True,
    "(s0 ** 8) ** 9": False,
    "((10**64)**64)**64": False,
    "Pow(Pow(Integer(10), Integer(64)), Integer(64))": False,
    "1 << 64": True,
    "1 << 9999999999": False,
    "LShift(Integer(1), Integer(9999999999))": False,
    "'s0' * 9999999999": False,
    "('s0' or 1) * 9999999999": False,
    "(1, 2) * 9999999999": False,
    "Piecewise((1, s0 > 2), (2, True))": True,
    "Pow(2, Float('oo'))": False,
    "Pow(10, e=9999999999)": False,
    "Float('1.5', precision=53)": True,
    "Float('1.5', precision=9999999999)": False,
    "Symbol('s0', positive=True, integer=True)": True,
}


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda text: text[:40])
def test_expressions_have_numbers_symbols_and_known_functions_only(expression: str) -> None:
    assert text.is_expression(expression) == EXPRESSIONS[expression]


GUARDS = {
    "(L['x'].size()[0] % 2) == 0": True,
    "L['flat_args'][0].stride()[1] >= 2 and math.floor(L['x'].size()[0] / 3) != 1": True,
    "L['options']['the gain'].size()[0] == max(1, L['x'].size()[1] // 2)": True,
    "math.sumprod(L['x'])": False,
    "torch.load('x')": False,
    "L['x'].numpy()": False,
    "L['x'].size(out=1)": False,
    "L['x'] == 'a' # comment": False,
    """L['a"b'] == 1""": False,
    "L['x'].size()[0] == 1\nexit()": False,
    "exec('x')": False,
    "'a' * 9999999999 == 1": False,
    "max('a', 'b') * 9999999999 == 1": False,
    "torch.sym_max('a', 'b') * 9999999999 == 1": False,
    "1 << 9999999999 == 1": False,
    "((10**64)**64)**64 == 1": False,
}


@pytest.mark.parametrize("guard", GUARDS)
def test_guards_compare_sizes_only(guard: str) -> None:
    assert text.is_guard(guard) == GUARDS[guard]


QUANTIZED = """
import sys
import numpy as np
import tandem

file, inputs = sys.argv[1:]
result = tandem.build(file, file + ".engine", profile="laptop")
assert "INT8 with the 4 ranges of the model's own Q/DQ" in result.report, result.report
with tandem.open_session(result.path) as session:
    (output,) = session.infer({session.inputs[0].name: np.load(inputs)}).values()
np.save(file + ".npy", output)
"""


class Quantized(torch.nn.Module):
    """A convolution as PT2E leaves it: Q and DQ of activations, DQ of INT8 weights per channel."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randint(-127, 128, (8, 3, 3, 3), dtype=torch.int8)
        weight[:, 0, 0, 0] = 127
        self.register_buffer("weight", weight)
        self.register_buffer("scales", torch.rand(8) * 0.01 + 0.001)
        self.register_buffer("zeros", torch.zeros(8, dtype=torch.int64))
        self.bias = torch.nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, 3, 8, 8] -> [1, 8, 4, 4] in steps of 0.05."""
        ops = torch.ops.quantized_decomposed

        def rounded(x: torch.Tensor, step: float) -> torch.Tensor:
            limits = (step, 0, -128, 127, torch.int8)
            return ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *limits), *limits)

        weight = ops.dequantize_per_channel(
            self.weight, self.scales, self.zeros, 0, -128, 127, torch.int8
        )
        y = torch.relu(torch.conv2d(rounded(x, 0.03), weight, self.bias, padding=1))
        return torch.nn.functional.max_pool2d(rounded(y, 0.05), 2)


def test_a_program_quantized_by_pt2e_keeps_its_int8(tmp_path: Path) -> None:
    import torch.ao.quantization.fx._decomposed  # registers the operators

    torch.manual_seed(0)
    module, x = Quantized().eval(), torch.randn(1, 3, 8, 8)
    file, inputs = tmp_path / "quantized.pt2", tmp_path / "x.npy"
    torch.export.save(torch.export.export(module, (x,)), file)
    np.save(inputs, x.numpy())
    # In a process of its own, where nobody has registered them.
    command = (sys.executable, "-c", QUANTIZED, str(file), str(inputs))
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    steps = np.abs(np.load(f"{file}.npy") - module(x).detach().numpy()) / 0.05
    assert steps.max() < 1.001
    assert np.count_nonzero(steps > 0.5) <= 0.02 * steps.size
