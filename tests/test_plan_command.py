"""`tandem plan` from the command line: what it prints, and what it refuses."""

import json

import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import helper
from planning_graphs import constant, graph_of

from device.errors import TandemError
from toolkit.cli.commands.plan import plan
from toolkit.partition.planning.portable import KernelSupport


@pytest.fixture
def model(tmp_path):
    """Eight convolutions, an operator that no DLA takes, eight convolutions."""
    nodes, weights, data = [], {}, "x"
    for index in range(17):
        made = "y" if index == 16 else f"t{index}"
        if index == 8:
            nodes.append(helper.make_node("Erf", [data], [made], name="erf"))
        else:
            weights[f"w{index}"] = constant(64, 64, 3, 3)
            operands = [data, f"w{index}"]
            name = f"conv{index}"
            nodes.append(helper.make_node("Conv", operands, [made], name=name, pads=[1] * 4))
        data = made
    return saved(tmp_path / "m.onnx", nodes, {"x": (1, 64, 56, 56)}, weights)


def saved(path, nodes, inputs, weights=None):
    onnx.save(ir.to_proto(graph_of(nodes, inputs, ["y"], weights)), path)
    return path


def run(*arguments):
    given = ["--profile", "agx-orin-64gb", *map(str, arguments)]
    done = CliRunner().invoke(plan, given)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def refused(*arguments):
    with pytest.raises(TandemError) as caught:
        run(*arguments)
    return str(caught.value)


def plan_of(*arguments):
    done = run("--json", *arguments)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    for one in found["plans"]:
        del one["search"]["seconds"]
    return found


def test_the_same_input_gives_the_same_plan(model):
    assert plan_of(model) == plan_of(model)


def test_every_node_is_listed_with_its_reason(model):
    (found,) = plan_of(model, "--objective", "gpu-relief")["plans"]
    assert {row["node"] for row in found["nodes"]} >= {"erf", "conv0", "conv16"}
    assert all(row["reason"] for row in found["nodes"])
    text = run(model, "--objective", "gpu-relief", "--nodes").stdout
    assert all(row["reason"] in text for row in found["nodes"])


def test_what_refuses_in_the_middle_is_what_to_change(model):
    (found,) = plan_of(model, "--objective", "gpu-relief")["plans"]
    (advice,) = found["advice"]
    assert advice["nodes"] == ["erf"]
    assert 0 < advice["gain"] <= 1


def test_the_page_holds_every_node_and_both_images(model, tmp_path):
    page = tmp_path / "plan.html"
    assert run(model, "--html", page).exit_code == 0
    text = page.read_text()
    assert text.count("<svg") == 2  # frames in flight, and the graph
    assert text.count("<div class=bars") == 4
    assert "conv16" in text
    assert "3 frames in flight" in text


def test_a_node_that_is_not_there_is_answered_with_the_nearest(model):
    said = refused(model, "--explain", "conv1x")
    assert "the nearest names are" in said
    assert "conv1" in said


def test_rates_that_do_not_fit_name_the_processor(model):
    said = refused(model, "--rate", "1e5")
    assert "gpu: busy" in said or "dla0: busy" in said


@pytest.fixture
def partly(tmp_path):
    """A convolution, a determinant, for which there is no kernel, and what follows it."""
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="conv", pads=[1] * 4),
        helper.make_node("Det", ["a"], ["d"], name="det"),
        helper.make_node("Erf", ["d"], ["y"], name="erf"),
    ]
    weights = {"w": constant(64, 64, 3, 3)}
    return saved(tmp_path / "partly.onnx", nodes, {"x": (1, 64, 112, 112)}, weights)


def test_a_node_without_a_kernel_is_portable_with_the_reason(partly):
    (found,) = plan_of(partly, "--precision", "fp32")["plans"]
    assert [(one["segment"], one["place"]) for one in found["segments"]] == [
        ("gpu.0.0", "gpu"),
        ("gpu.0.1", "portable"),
    ]
    no_kernel, unpaid = "node 'det' (Det) has no kernel yet", "a kernel would not save"
    reasons = {row["node"]: row["reason"] for row in found["portable"]}
    assert list(reasons) == ["det", "erf"]
    assert reasons["det"] == no_kernel
    assert unpaid in reasons["erf"]
    assert all(reasons[r["node"]] in r["reason"] for r in found["nodes"] if r["node"] in reasons)
    text = run(partly, "--precision", "fp32").stdout
    assert "gpu.0.1 portable" in text
    assert f"1 x Det: {no_kernel}" in text
    assert f"1 x Erf: {unpaid}" in text


def test_a_plan_with_kernels_for_all_nodes_has_no_portable_ones(model):
    (found,) = plan_of(model)["plans"]
    assert found["portable"] == []
    assert {one["place"] for one in found["segments"]} <= {"dla", "gpu"}


def test_missing_kernels_change_no_predicted_figure(partly, monkeypatch):
    (found,) = plan_of(partly, "--precision", "fp32")["plans"]
    monkeypatch.setattr("toolkit.engine.plan_models.ask_gpu", lambda *_: KernelSupport())
    (whole,) = plan_of(partly, "--precision", "fp32")["plans"]
    assert [one["segment"] for one in whole["segments"]] == ["gpu.0"]
    assert found["compared"] == whole["compared"]
    total = sum(one["predicted_us"] for one in found["segments"])
    assert total == pytest.approx(whole["segments"][0]["predicted_us"])


def test_a_node_is_explained_with_what_the_gpu_says(partly):
    said = json.loads(run(partly, "--explain", "det", "--json").stdout)
    assert said["no_kernel"] == "node 'det' (Det) has no kernel yet"
    assert "GPU: node 'det' (Det) has no kernel yet" in run(partly, "--explain", "det").stdout
    assert "GPU: kernels compute it" in run(partly, "--explain", "conv").stdout


@pytest.mark.parametrize("option", ["--rate", "--seconds"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_numbers_that_are_none_are_refused_by_option(model, option, value):
    found = run(model, f"{option}={value}")
    assert found.exit_code == 2
    assert option in found.output


@pytest.mark.parametrize("op", ["Identity", "Relu", "Erf"])
def test_a_graph_of_one_node_is_planned(op, tmp_path):
    path = saved(tmp_path / "one.onnx", [helper.make_node(op, ["x"], ["y"])], {"x": (1, 8, 4, 4)})
    assert run(path, "--html", tmp_path / "one.html").exit_code == 0


def test_models_of_a_workload_keep_their_rates(model, tmp_path):
    file = tmp_path / "w.toml"
    file.write_text(
        '[[model]]\npath = "m.onnx"\nname = "a"\nrate_hz = 30\n'
        '[[model]]\npath = "m.onnx"\nname = "b"\nrate_hz = 10\n'
    )
    found = plan_of("--workload", file, "--objective", "energy")
    assert [(p["model"], p["rate_hz"]) for p in found["plans"]] == [("a", 30.0), ("b", 10.0)]
    for one in found["plans"]:
        assert one["simulated"]["throughput_hz"] == pytest.approx(one["rate_hz"], rel=0.02)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[model]]\npath = "none.onnx"\n', "none.onnx"),
        ('[[model]]\npath = "m.onnx"\n[[model]]\npath = "m.onnx"\n', "two models are called 'm'"),
        ('[[model]]\npath = "a.onnx"\nrate_hz = 1\n[[model]]\npath = "b.onnx"\n', "all or none"),
        ("[[model]]\npath = 5\n", "no Path from 5"),
        ("[[model]]\n", "path"),
    ],
)
def test_a_wrong_workload_is_refused_by_what_is_wrong(text, said, tmp_path):
    file = tmp_path / "w.toml"
    file.write_text(text)
    assert said in refused("--workload", file)
