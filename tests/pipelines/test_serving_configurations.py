"""Configurations that were written for Triton are understood, or refused by the field's name."""

import asyncio
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from serving_fixtures import identity

from pipelines.serving.onnx_file import OnnxFile
from pipelines.serving.repository import Mode, Repository, scan

INPUT = 'input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] %s } ]\n'
OUTPUT = 'output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]\n'
BATCHED = "max_batch_size: 8\n" + INPUT % "" + OUTPUT
SAMPLE = (
    'inputs { key: "INPUT0" value: { data_type: TYPE_FP32 dims: [ %s ] %s } }'
)  # fmt: skip


def model(root: Path, name: str, config: str) -> None:
    identity(root, name, TensorProto.FLOAT, ["batch", 4])
    (root / name / "config.pbtxt").write_text(config)


def reasons(root: Path, mode: Mode = "none") -> dict[str, str]:
    """Load a repository, and return why models are not ready."""

    async def load() -> dict[str, str]:
        models = Repository(partial(scan, root), mode)
        await models.load_all()
        result = models.reasons
        await models.close()
        return result

    return asyncio.run(load())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BATCHED + 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "N" }', "batch_input"),
        (BATCHED + 'batch_output { target_name: "OUTPUT0" }', "batch_output"),
        ("max_batch_size: 8\n" + INPUT % "allow_ragged_batch: true", "input.allow_ragged_batch"),
        ("max_batch_size: 8\n" + INPUT % "is_shape_tensor: true", "input.is_shape_tensor"),
        (BATCHED + 'model_operations { op_library_filename: "x.so" }', "model_operations"),
        (
            BATCHED + 'model_repository_agents { agents { name: "checksum" } }',
            "model_repository_agents: agents are not run",
        ),
        (
            BATCHED + "dynamic_batching { preferred_batch_size: [ 4, 16 ] }",
            "preferred_batch_size 16: it must be 1 to 8",
        ),
        (
            BATCHED + "dynamic_batching { priority_levels: 2 }",
            "default_priority_level 0: it must be 1 to 2",
        ),
        (
            BATCHED + "dynamic_batching { priority_levels: 2 default_priority_level: 1"
            " priority_queue_policy { key: 3 value: { max_queue_size: 2 } } }",
            "priority_queue_policy of level 3: levels are 1 to 2",
        ),
    ],
)
def test_what_is_not_done_here_is_refused_by_its_name(
    tmp_path: Path, config: str, reason: str
) -> None:
    model(tmp_path, "m", config)
    assert reason in reasons(tmp_path)["m"]


def test_what_has_no_effect_here_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model(
        tmp_path,
        "m",
        BATCHED + "instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0 ] } ]\n"
        "dynamic_batching { preferred_batch_size: [ 4, 8 ] preserve_ordering: true }\n"
        'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt"'
        ' parameters { key: "precision_mode" value: "FP16" } } } }\n'
        'parameters { key: "intra_op_thread_count" value: { string_value: "1" } }\n'
        "response_cache { enable: true }\nversion_policy { latest { num_versions: 1 } }\n",
    )
    with caplog.at_level(logging.WARNING, "pipelines.serving"):
        assert reasons(tmp_path) == {}
    assert [record.getMessage() for record in caplog.records] == [
        "model 'm': without effect here: dynamic_batching.preserve_ordering, instance_group.gpus,"
        " instance_group.kind, optimization, parameters, response_cache"
    ]


def test_samples_run_on_each_instance_before_the_model_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[np.ndarray[Any, Any]] = []
    infer = OnnxFile.infer

    def counted(self: OnnxFile, feeds: Any) -> Any:
        runs.append(feeds["INPUT0"])
        return infer(self, feeds)

    monkeypatch.setattr(OnnxFile, "infer", counted)
    samples = (
        f"model_warmup [ {{ batch_size: 2 count: 3 {SAMPLE % ('4', 'zero_data: true')} }},"
        f" {{ batch_size: 1 {SAMPLE % ('4', 'random_data: true')} }},"
        f""" {{ batch_size: 8 {SAMPLE % ("4", 'input_data_file: "rows"')} }} ]\n"""
    )
    model(tmp_path, "m", BATCHED + samples + "instance_group { count: 2 }")
    row = np.arange(4, dtype=np.float32)
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "warmup" / "rows").write_bytes(row.tobytes())
    assert reasons(tmp_path) == {}
    assert [len(one) for one in runs] == [2] * 6 + [1] * 2 + [8] * 2
    assert not runs[0].any()
    assert runs[6].any()
    assert (runs[8] == row).all()


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (SAMPLE.replace("INPUT0", "INPUT9") % ("4", "zero_data: true"), "unexpected .* 'INPUT9'"),
        (SAMPLE % ("5", "zero_data: true"), "unexpected shape"),
        (SAMPLE % ("-1", "zero_data: true"), "a dimension must be 0 or more"),
        (SAMPLE % ("4000000000", "zero_data: true"), "has 16000000000 bytes; at most"),
        (SAMPLE % ("4", 'input_data_file: "../../secret"'), "is not inside"),
        (SAMPLE % ("4", 'input_data_file: "gone"'), "No such file"),
        ("batch_size: 9 " + SAMPLE % ("4", "zero_data: true"), "batch_size 9; at most 8"),
        ("count: 1001 " + SAMPLE % ("4", "zero_data: true"), "count 1001; at most 1000"),
    ],
)
def test_a_sample_that_does_not_fit_fails_the_load(
    tmp_path: Path, sample: str, reason: str
) -> None:
    model(tmp_path, "m", f"{BATCHED}model_warmup {{ {sample} }}")
    (tmp_path / "secret").write_bytes(bytes(16))
    assert re.search(reason, reasons(tmp_path)["m"])


def ensemble(root: Path, step: str, kind: str = "FP32") -> None:
    (root / "both" / "1").mkdir(parents=True)
    ports = BATCHED.replace("FP32", kind)
    (root / "both" / "config.pbtxt").write_text(
        f'platform: "ensemble"\n{ports}ensemble_scheduling {{ step [ {{ {step} }} ] }}'
    )


STEP = (
    'model_name: "m" model_version: -1 input_map { key: "INPUT0" value: "INPUT0" }'
    ' output_map { key: "OUTPUT0" value: "OUTPUT0" }'
)


@pytest.mark.parametrize(
    ("step", "kind", "reason"),
    [
        (STEP.replace('"m"', '"gone"'), "FP32", "has the step 'gone', which the repository has"),
        (STEP.replace('key: "INPUT0"', 'key: "x"'), "FP32", "has 'x' in its input_map"),
        (STEP.replace('key: "OUTPUT0"', 'key: "x"'), "FP32", "has 'x' in its output_map"),
        (STEP.replace('input_map { key: "INPUT0" value: "INPUT0" }', ""), "FP32", "no 'INPUT0' in"),
        (STEP.replace("-1", "7"), "FP32", "'both' has version 7 of the step 'm': .* it has 1"),
        (STEP, "INT32", "'INPUT0' is INT32, and the step 'm' takes FP32"),
    ],
)
def test_steps_of_an_ensemble_are_checked_when_it_is_loaded(
    tmp_path: Path, step: str, kind: str, reason: str
) -> None:
    model(tmp_path, "m", BATCHED)
    ensemble(tmp_path, step, kind)
    assert re.search(reason, reasons(tmp_path)["both"])


def test_a_step_may_come_later_where_files_are_polled(tmp_path: Path) -> None:
    ensemble(tmp_path, STEP)
    assert reasons(tmp_path, "poll") == {}
