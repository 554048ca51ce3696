"""`tandem plan` from the command line: what it prints, and what it refuses."""

import json
import re
import resource
import subprocess
import sys

import onnx
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from onnx import helper
from planning_graphs import constant, graph_of

from device.errors import TandemError
from scripts.networks import NETWORKS
from toolkit.cli.commands.plan import plan
from toolkit.partition.planning.portable import KernelSupport


@pytest.fixture
def model(tmp_path):
    """Eight convolutions, an operator that no DLA takes, eight convolutions."""
    nodes, weights, data = [], {}, "x"
    for index in range(17):
        result = "y" if index == 16 else f"t{index}"
        if index == 8:
            nodes.append(helper.make_node("Erf", [data], [result], name="erf"))
        else:
            weights[f"w{index}"] = constant(64, 64, 3, 3)
            operands = [data, f"w{index}"]
            name = f"conv{index}"
            nodes.append(helper.make_node("Conv", operands, [result], name=name, pads=[1] * 4))
        data = result
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
    report = json.loads(done.stdout)
    for one in report["plans"]:
        del one["search"]["seconds"]
    return report


def test_the_same_input_gives_the_same_plan(model):
    assert plan_of(model) == plan_of(model)


def test_every_node_is_listed_with_its_reason(model):
    (plan,) = plan_of(model, "--objective", "gpu-relief")["plans"]
    assert {row["node"] for row in plan["nodes"]} >= {"erf", "conv0", "conv16"}
    assert all(row["reason"] for row in plan["nodes"])
    text = run(model, "--objective", "gpu-relief", "--nodes").stdout
    assert all(row["reason"] in text for row in plan["nodes"])


def test_what_refuses_in_the_middle_is_what_to_change(model):
    (plan,) = plan_of(model, "--objective", "gpu-relief")["plans"]
    (advice,) = plan["advice"]
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
    answer = refused(model, "--explain", "conv1x")
    assert "the nearest names are" in answer
    assert "conv1" in answer


def test_rates_that_do_not_fit_name_the_processor(model):
    answer = refused(model, "--rate", "1e5")
    assert "gpu: busy" in answer or "dla0: busy" in answer


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
    (plan,) = plan_of(partly, "--precision", "fp32")["plans"]
    assert [(one["segment"], one["place"]) for one in plan["segments"]] == [
        ("gpu.0.0", "gpu"),
        ("gpu.0.1", "portable"),
    ]
    no_kernel, unpaid = "node 'det' (Det) has no kernel yet", "a kernel would not save"
    reasons = {row["node"]: row["reason"] for row in plan["portable"]}
    assert list(reasons) == ["det", "erf"]
    assert reasons["det"] == no_kernel
    assert unpaid in reasons["erf"]
    assert all(reasons[r["node"]] in r["reason"] for r in plan["nodes"] if r["node"] in reasons)
    text = run(partly, "--precision", "fp32").stdout
    assert "gpu.0.1 portable" in text
    assert f"1 x Det: {no_kernel}" in text
    assert f"1 x Erf: {unpaid}" in text


def test_a_plan_with_kernels_for_all_nodes_has_no_portable_ones(model):
    (plan,) = plan_of(model)["plans"]
    assert plan["portable"] == []
    assert {one["place"] for one in plan["segments"]} <= {"dla", "gpu"}


def test_missing_kernels_change_no_predicted_figure(partly, monkeypatch):
    (plan,) = plan_of(partly, "--precision", "fp32")["plans"]
    monkeypatch.setattr("toolkit.engine.plan_models.ask_gpu", lambda *_: KernelSupport())
    (whole,) = plan_of(partly, "--precision", "fp32")["plans"]
    assert [one["segment"] for one in whole["segments"]] == ["gpu.0"]
    assert plan["compared"] == whole["compared"]
    total = sum(one["predicted_us"] for one in plan["segments"])
    assert total == pytest.approx(whole["segments"][0]["predicted_us"])


def test_a_node_is_explained_with_what_the_gpu_says(partly):
    answer = json.loads(run(partly, "--explain", "det", "--json").stdout)
    assert answer["no_kernel"] == "node 'det' (Det) has no kernel yet"
    assert "GPU: node 'det' (Det) has no kernel yet" in run(partly, "--explain", "det").stdout
    assert "GPU: kernels compute it" in run(partly, "--explain", "conv").stdout


@pytest.mark.parametrize("option", ["--rate", "--seconds"])
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_numbers_that_are_none_are_refused_by_option(model, option, value):
    result = run(model, f"{option}={value}")
    assert result.exit_code == 2
    assert option in result.output


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
    report = plan_of("--workload", file, "--objective", "energy")
    assert [(p["model"], p["rate_hz"]) for p in report["plans"]] == [("a", 30.0), ("b", 10.0)]
    for one in report["plans"]:
        assert one["simulated"]["throughput_hz"] == pytest.approx(one["rate_hz"], rel=0.02)


def test_a_workload_with_a_service_says_what_is_left_for_it(model, tmp_path):
    file = tmp_path / "w.toml"
    file.write_text(
        '[[model]]\npath = "m.onnx"\nrate_hz = 30\n'
        '[[service]]\nname = "vlm"\nmemory_mb = 3500\ngpu_share = 0.3\nperiod_ms = 5\n'
    )
    report = plan_of("--workload", file)
    assert report["memory_shares"]["shares"]["vlm"] == 3500 * 2**20
    assert report["services"][0]["gpu_share"] == 0.3
    assert report["utilisation"]["gpu"] >= 0.3
    text = run("--workload", file, "--html", tmp_path / "w.html")
    assert text.exit_code == 0, text.output
    assert "1 model and vlm share" in text.output
    assert "memory: vlm 3,500 + weights of m" in text.output
    file.write_text(file.read_text().replace("3500", "99000"))
    assert "take smaller models, or a board with more memory" in refused("--workload", file)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ('[[model]]\npath = "none.onnx"\n', "none.onnx"),
        ('[[model]]\npath = "m.onnx"\n[[service]]\nname = "m"\nmemory_mb = 1\n', "called 'm'"),
        (
            '[[model]]\npath = "m.onnx"\n[[service]]\nname = "v"\nmemory_mb = 1\ngpu_share = 0.1\n',
            "give each a rate_hz",
        ),
        ('[[model]]\npath = "m.onnx"\n[[model]]\npath = "m.onnx"\n', "two models are called 'm'"),
        ('[[model]]\npath = "a.onnx"\nrate_hz = 1\n[[model]]\npath = "b.onnx"\n', "all or none"),
        ("[[model]]\npath = 5\n", "no Path from 5"),
        ("[[model]]\n", "path"),
    ],
)
def test_a_wrong_workload_is_refused_by_what_is_wrong(text, answer, tmp_path):
    file = tmp_path / "w.toml"
    file.write_text(text)
    assert answer in refused("--workload", file)


def processors(plan):
    return {row["node"]: row["processor"] for row in plan["nodes"]}


def test_forced_nodes_are_where_they_were_asked_for(model):
    (free,) = plan_of(model, "--objective", "latency")["plans"]
    assert set(processors(free).values()) == {"gpu"}
    (one,) = plan_of(model, "--objective", "latency", "--force-dla", "conv3")["plans"]
    assert processors(one)["conv3"] == "dla0"
    reason = next(row["reason"] for row in one["nodes"] if row["node"] == "conv3")
    assert reason == "on the DLA, as asked"
    (every,) = plan_of(model, "--objective", "latency", "--force-dla", "all")["plans"]
    assert {name for name, where in processors(every).items() if where == "gpu"} == {"erf"}
    assert every["compared"][1]["name"] == "GPU only"
    assert every["compared"][1]["latency_us"] == free["compared"][1]["latency_us"]


def test_a_node_kept_on_the_gpu_says_so(model):
    options = ("--objective", "gpu-relief", "--force-gpu", "conv3")
    (plan,) = plan_of(model, *options, "--force-dla", "conv4")["plans"]
    row = next(row for row in plan["nodes"] if row["node"] == "conv3")
    assert (row["processor"], row["rule"]) == ("gpu", "F1")
    assert processors(plan)["conv4"] == "dla0"


def test_all_nodes_but_those_named_for_the_dla_run_on_the_gpu(model):
    options = ("--objective", "gpu-relief", "--force-gpu", "all")
    (plan,) = plan_of(model, *options)["plans"]
    assert set(processors(plan).values()) == {"gpu"}
    assert {row["rule"] for row in plan["nodes"] if row["node"] != "erf"} == {"F1"}
    (plan,) = plan_of(model, *options, "--force-dla", "conv4")["plans"]
    assert {n for n, where in processors(plan).items() if where != "gpu"} == {"conv4"}


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (("--force-dla", "erf"), r"rule op.not-exposed refuses it: operator Erf, but"),
        (("--force-dla", "conv99"), r"no such node; the nearest names are conv9"),
        (("--force-gpu", "every"), r"--force-gpu every: the graph that is planned has no such"),
        (("--force-gpu", "all", "--force-dla", "all"), r"--force-dla` and --force-gpu"),
        (
            ("--force-dla", "conv1", "--force-gpu", "conv1"),
            r"--force-dla` and --force-gpu",
        ),
        (("--force-dla", "conv1", "--precision", "fp32"), r"rule G1 refuses it"),
    ],
)
def test_nodes_that_cannot_be_forced_are_refused_by_name(options, answer, model):
    assert re.search(answer, refused(model, *options))


def test_the_options_of_trtexec_place_the_nodes_as_the_plan_does(model):
    options = ("--objective", "gpu-relief", "--jetpack", "6.2")
    text = run(model, *options).stdout
    line = next(line for line in text.splitlines() if line.startswith("  trtexec "))
    assert "--int8 --calib=MODEL.cache --fp16" in line
    assert '--useDLACore=0 --allowGPUFallback --layerDeviceTypes="erf:GPU"' in line
    (plan,) = plan_of(model, *options)["plans"]
    first, predicted = plan["trtexec"]
    assert first == line.strip()
    assert f"  {predicted}" in text
    assert predicted.startswith("predicted for this command")


def test_the_makespan_of_a_workload_has_a_schedule(model, tmp_path):
    file = tmp_path / "w.toml"
    file.write_text(
        '[[model]]\npath = "m.onnx"\nname = "a"\n[[model]]\npath = "m.onnx"\nname = "b"\n'
    )
    options = ("--workload", file, "--objective", "makespan", "--seconds", "1")
    report = plan_of(*options)
    value = report["plans"][0]["search"]["value"]
    assert max(row["end_us"] for row in report["schedule"]) <= value + 1e-6
    alone = sum(plan["compared"][1]["latency_us"] for plan in report["plans"])
    assert value < alone
    text = run(*options, "--html", tmp_path / "w.html").stdout
    assert "a frame of each model is done after" in text
    assert run(model, "--objective", "makespan").exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["yolox_m", "yolo26x", "densenet121"])
def test_a_plan_of_a_large_network_takes_five_seconds_of_one_core(name, tmp_path):
    path = tmp_path / f"{name}.onnx"
    ir.save(NETWORKS[name].model(), path)
    command = [sys.executable, "-m", "toolkit.cli", "plan", str(path), "--profile"]
    seconds = []
    for _ in range(3):  # the least of three: a shared machine makes CPU time longer, never shorter
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, "agx-orin-64gb"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        seconds.append(used)
    assert min(seconds) <= 5.0


def test_nodes_that_a_build_keeps_in_floating_point_stay_off_the_dla_in_a_plan(tmp_path) -> None:
    sizes = {"h": constant(1, 64, 1, 1)}
    nodes = [
        helper.make_node("Mul", ["x", "h"], ["boxes"], name="boxes"),
        helper.make_node("Sigmoid", ["x"], ["scores"], name="scores"),
        helper.make_node("Concat", ["boxes", "scores"], ["y"], name="both", axis=1),
    ]
    path = saved(tmp_path / "m.onnx", nodes, {"x": (1, 64, 56, 56)}, sizes)
    for precision, remaining in (("int8", True), ("fp16", False)):
        (planned,) = plan_of(path, "--precision", precision)["plans"]
        rules = {row["node"]: row["rule"] for row in planned["nodes"]}
        assert (rules["both"] == "K1") == remaining


def test_a_plan_without_ranges_says_that_scores_may_keep_nodes_in_floating_point(tmp_path) -> None:
    weights = {f"w{at}": constant(64, 64, 3, 3) for at in range(6)}
    nodes = [
        helper.make_node("Conv", [f"t{at}" if at else "x", f"w{at}"], [f"t{at + 1}"],
                         name=f"conv{at}", pads=[1] * 4)
        for at in range(6)
    ]  # fmt: skip
    for last, noted in (("Sigmoid", True), ("Relu", False)):
        ends = [*nodes, helper.make_node(last, ["t6"], ["y"], name="end")]
        path = saved(tmp_path / f"{last}.onnx", ends, {"x": (1, 64, 56, 56)}, weights)
        forced = ("--force-dla", "all")
        text, values = run(path, *forced).stdout, plan_of(path, *forced)
        (notes,) = values["notes"].values()
        assert ("will probably keep nodes in floating point" in " ".join(notes)) == noted
        assert ("note: all nodes are taken to be in INT8" in text) == noted
        (half,) = plan_of(path, *forced, "--precision", "fp16")["notes"].values()
        assert not half


@pytest.mark.parametrize("option", [("--precision", "fp16"), ("--no-rewrites",)])
def test_data_of_a_plan_are_for_int8_as_a_build_has_it(option, model, tmp_path) -> None:
    done = run(model, "--data", tmp_path, *option)
    assert done.exit_code == 2
    assert "--data calibrates INT8 as a build does" in done.output


@pytest.mark.parametrize(
    "option",
    [("--html", "p.html"), ("--nodes",), ("--cycles",), ("--trtexec",), ("--max-latency-ms", "9")],
)
def test_an_explanation_of_a_node_refuses_the_options_of_a_plan(option, model) -> None:
    done = run(model, "--explain", "erf", *option)
    assert done.exit_code == 2
    assert option[0] in done.output


def test_what_a_plan_has_no_use_for_is_refused(model, tmp_path) -> None:
    done = run(model, "--precision", "fp16", "--table", tmp_path / "none.json")
    assert (done.exit_code, "--precision fp16 has no use for it" in done.output) == (2, True)
    both = run(model, "--workload", tmp_path / "none.toml")
    assert (both.exit_code, "not both" in both.output) == (2, True)


def test_files_that_cannot_be_written_are_refused_before_the_search(
    model, tmp_path, monkeypatch
) -> None:
    monkeypatch.delattr("toolkit.cli.actions.plan.make_plan")
    assert "there is no folder" in refused(model, "--html", tmp_path / "missing" / "p.html")
    workload = tmp_path / "w.toml"
    workload.write_text('[[model]]\npath = "m.onnx"\n')
    for name, text in (("w.toml", "is there already"), ("missing/p.toml", "there is no folder")):
        assert text in refused("--workload", workload, "--pipeline", tmp_path / name)
