"""The site of docs/: it builds, pages are short, tables hold what the code has, commands run."""

import ast
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import click
import pytest
from doc_tables import rows_in, rows_of, sections
from docs_fixtures import link_configs

import configs
from device.agent.config import (
    AgentConfig,
    BrokerTable,
    CommandsTable,
    LogTable,
    PipelineTable,
    PrepareTable,
    SmpTable,
    SourceTable,
    TlsTable,
    TrustTable,
    UpdateTable,
)
from device.protocol import documents
from device.protocol.messages import Reload, Stats
from device.protocol.topics import FixedTopic, PipelineTopics, Topics
from pipelines import config, load_config, model_config, sink_config, track_config
from pipelines.results import Attribute
from pipelines.sinks.events import (
    ClassShare,
    DepthRange,
    Detection,
    Event,
    ModelRows,
    TextLine,
)
from pipelines.sinks.track_lifecycle import ObjectEvent, ObjectState
from pipelines.stages.decoders.table import ROWS
from pipelines.stages.zones import ZoneEvent
from scripts import cli_page, cost_report
from scripts.cost_result import read_fit
from toolkit.cli.main import tandem
from toolkit.partition.costs.constants import load_costs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MOST_WORDS = 1500
MOST_WORDS_BY_HAND = 65_000  # of all pages together that no script writes
# References, not read from end to end.
LONG_PAGES = {
    "flashing.md",  # most of it are its messages
    "board.md",
    "commands/fleet.md",
    "decoder_keys.md",
    "rules.md",
    "operators.md",
}
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
TABLES = {
    "pipelines.md": {
        "pipeline.toml": config.PipelineConfig,
        "preprocess": config.PreprocessConfig,
        "mqtt": sink_config.MqttSink,
        "jsonl": sink_config.JsonlSink,
        "video": sink_config.VideoSink,
        "snapshot": sink_config.SnapshotSink,
        "prometheus": sink_config.PrometheusSink,
        "model.toml": config.ModelConfig,
    },
    "serving.md": {"On a board": config.ServeConfig},
    "services.md": {"The table `service`": config.ServiceConfig},
    "several_models.md": {"models": model_config.PipelineModel},
    "sources.md": {"source": config.SourceConfig},
    "load.md": {"load": load_config.LoadConfig, "steps": load_config.LoadStep},
    "tracking.md": {
        "roi": track_config.RoiConfig,
        "tracker": track_config.TrackerConfig,
        "zones": track_config.ZoneConfig,
        "lines": track_config.LineConfig,
    },
    "serial.md": {"serial": sink_config.SerialSink},
    "ros2.md": {"ros2": sink_config.Ros2Sink},
    "recordings.md": {"mcap": sink_config.McapSink, "foxglove": sink_config.FoxgloveSink},
    "results.md": {
        "detections": Event,
        "detection": Detection,
        "attribute": Attribute,
        "model rows": ModelRows,
        "class share": ClassShare,
        "depth range": DepthRange,
        "text line": TextLine,
        "zone event": ZoneEvent,
        "events": ObjectEvent,
        "object state": ObjectState,
    },
    "decoder_keys.md": {row.kind: type(row.example) for row in ROWS},
    "mqtt.md": {
        "stats": Stats,
        "reload": Reload,
        "state": documents.StateDocument,
        "reported": documents.Reported,
        "beat": documents.Beat,
        "what runs": documents.Running,
        "status": documents.PipelineReport,
        "update": documents.Update,
        "facts": documents.DeviceFacts,
        "agent versions": documents.AgentReport,
        "measurements": documents.Measured,
    },
    "mqtt_updates.md": {
        "desired": documents.Desired,
        "release": documents.ReleaseSpec,
        "policy": documents.InstallPolicy,
        "blob": documents.BlobSpec,
        "blob/get": documents.BlobGet,
    },
    "signed.md": {
        "tuf/get": documents.TufGet,
        "tuf/reply": documents.TufReply,
        "signed": documents.Signed,
        "signature": documents.Signature,
    },
    "device_commands.md": {
        "command": documents.Command,
        "signed command": documents.SignedCommand,
        "command state": documents.CommandState,
        "log line": documents.LogLine,
    },
    "board.md": {
        "agent.toml": AgentConfig,
        "broker": BrokerTable,
        "broker.tls": TlsTable,
        "update": UpdateTable,
        "prepare": PrepareTable,
        "pipeline": PipelineTable,
        "trust": TrustTable,
        "commands": CommandsTable,
        "log": LogTable,
        "smp": SmpTable,
        "source": SourceTable,
    },
}
TITLES = {
    config.SourceConfig: "table `source`",
    config.ServeConfig: "table `serve`",
    config.ServiceConfig: "table `service`",
    load_config.LoadConfig: "table `load`",
    load_config.LoadStep: "table `steps`",
    config.PreprocessConfig: "table `preprocess`",
    model_config.PipelineModel: "table `models`",
    **{type(row.example): "a decoder" for row in ROWS},
    track_config.RoiConfig: "table `roi`",
    track_config.TrackerConfig: "table `tracker`",
    track_config.ZoneConfig: "table `zones`",
    track_config.LineConfig: "table `lines`",
    **dict.fromkeys(get_args(sink_config.SinkConfig), "a sink"),
    ZoneEvent: "zone event",
    ObjectState: "object state",
    BrokerTable: "table `broker`",
    UpdateTable: "table `update`",
    PrepareTable: "table `prepare`",
    PipelineTable: "table `pipeline`",
    SourceTable: "table `source`",
    TrustTable: "table `trust`",
    SmpTable: "table `smp`",
    CommandsTable: "table `commands`",
    LogTable: "table `log`",
    TlsTable: "table `broker.tls`",
    documents.ReleaseSpec: "a release",
    documents.InstallPolicy: "a policy",
    documents.DeviceFacts: "facts",
    documents.AgentReport: "agent versions",
    documents.Measured: "measurements",
    documents.Signature: "a signature",
    documents.BlobSpec: "a blob",
    documents.Running: "what runs",
    documents.PipelineReport: "a status",
    documents.Update: "an update",
    Detection: "detection",
    Attribute: "attribute",
    ModelRows: "model rows",
    ClassShare: "class share",
    DepthRange: "depth range",
    TextLine: "text line",
}


def text_of(page: str) -> str:
    return (DOCS / page).read_text()


def test_the_site_builds_and_every_link_resolves(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site"))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "pipelines" / "index.html").exists()


def test_file_names_of_pages_are_lower_case() -> None:
    assert [page for page in PAGES if page != page.lower()] == ["ARCHITECTURE.md"]


@pytest.mark.parametrize("page", [page for page in PAGES if page not in LONG_PAGES])
def test_a_page_is_not_longer_than_a_readers_patience(page: str) -> None:
    words = [word for word in re.split(r"[\s|]+", text_of(page)) if re.search(r"\w", word)]
    assert len(words) <= MOST_WORDS


def test_the_pages_kept_by_hand_stay_short_together() -> None:
    generated = {"rules.md", "operators.md", "decoder_keys.md"}
    pages = [page for page in PAGES if page not in generated and not page.startswith("commands/")]
    words = sum(bool(re.search(r"\w", word)) for page in pages for word in text_of(page).split())
    assert words <= MOST_WORDS_BY_HAND


@pytest.mark.parametrize(
    ("page", "heading"), [(page, heading) for page, rows in TABLES.items() for heading in rows]
)
def test_a_table_has_every_key_with_its_type_and_default(page: str, heading: str) -> None:
    assert rows_in(sections(text_of(page))[heading]) == rows_of(TABLES[page][heading], TITLES)


def test_every_struct_that_is_read_or_sent_has_its_table() -> None:
    shown = {kind for rows in TABLES.values() for kind in rows.values()}
    for module, base in (
        (config, config._Value),
        (sink_config, sink_config.Value),
        (track_config, track_config.Value),
        (documents, documents._Document),
    ):
        classes = {one for one in vars(module).values() if isinstance(one, type)}
        assert {one for one in classes if issubclass(one, base) and one is not base} <= shown


def test_every_decoder_is_in_the_table_of_families() -> None:
    families = text_of("decoders.md")
    assert [row.kind for row in ROWS if f"`{row.kind}`" not in families] == []


def test_the_pipeline_of_the_page_is_the_shipped_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", text_of("pipelines.md"), re.DOTALL)
    (tmp_path / "pipeline.toml").write_text(example)
    shipped = config.load_pipeline(configs.ROOT / "pipelines" / "robot-objects.toml")
    assert config.load_pipeline(tmp_path / "pipeline.toml") == shipped


def test_the_page_on_mqtt_has_every_topic() -> None:
    topics = Topics("DEVICE")
    names = [name for name, one in vars(Topics).items() if isinstance(one, FixedTopic)]
    patterns = ("chunks", "tuf_replies", "commands")
    known = {getattr(topics, name) for name in names if name not in patterns}
    pipeline = PipelineTopics(topics.root)
    names = [name for name, one in vars(PipelineTopics).items() if isinstance(one, FixedTopic)]
    known |= {getattr(pipeline, name) for name in names}
    known |= {topics.chunk("SHA256", "N", "PEER"), topics.tuf_reply("ID", "N")}
    known |= {topics.command("OP", "ID"), topics.log("SOURCE")}
    assert set(re.findall(r"^\| `(fleet/\S+)` \|", text_of("mqtt.md"), re.MULTILINE)) == known


def test_the_pages_of_commands_are_up_to_date() -> None:
    written = {file: (cli_page.FOLDER / file).read_text() for file in cli_page.PAGES}
    assert written == cli_page.pages(), "run python -m scripts.cli_page --write"


def templates(messages: Sequence[str]) -> Iterator[str]:
    """Yield the texts of files with all words of a message, with ... for what is filled in."""
    words = [re.findall(r"\w{4,}", message) for message in messages]
    for package in ("device", "pipelines", "toolkit", "calibration"):
        for path in (ROOT / package).rglob("*.py"):
            code = path.read_text()
            if not any(all(word in code for word in of_one) for of_one in words):
                continue  # to parse every file would take seconds
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(
                        str(one.value) if isinstance(one, ast.Constant) else "..."
                        for one in node.values
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_every_error_message_of_the_faq_is_in_the_code() -> None:
    messages = re.findall(r"^### (.*)$", text_of("faq.md"), re.MULTILINE)
    known = list(templates(messages))
    lost = [message for message in messages if not any(message in text for text in known)]
    assert len(messages) >= 20
    assert not lost


def test_the_figures_of_the_page_on_costs_are_those_of_the_report() -> None:
    report = set(cost_report.summary(read_fit()).splitlines())
    pages = text_of("costs.md") + text_of("costs_intervals.md")
    rows = [line for line in pages.splitlines() if line.startswith("| ")]
    assert len(rows) > 20
    assert set(rows) <= report


def test_the_report_on_costs_is_of_the_shipped_constants() -> None:
    costs, fit_run = load_costs(), read_fit()
    assert costs.gpu.array_efficiency.value == pytest.approx(fit_run.gpu.array_efficiency, 1e-3)
    assert costs.energy.idle_w.value == pytest.approx(fit_run.energy.idle_w, 1e-3)
    lines = cost_report.every_row(fit_run).splitlines()
    assert len(lines) > len(fit_run.times) + len(fit_run.checks)


def commands_of(page: str) -> Iterator[list[str]]:
    """Yield the words of every `tandem` command in the blocks of a page."""
    for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text_of(page), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("tandem "):
                yield shlex.split(re.split(r"\s[|>&;<]", line)[0], comments=True)[1:]


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands_of(page))])
def test_every_command_of_a_page_is_there_and_has_its_options(page: str) -> None:
    for words in commands_of(page):
        command, options = tandem, {"--help", "-h"}
        for word in words:
            options |= {name for one in command.params for name in one.opts + one.secondary_opts}
            if isinstance(command, click.Group) and not word.startswith("-"):
                below = command.get_command(click.Context(command), word)
                command = below if below is not None else command
        if command.name == "bundle":  # with a file it is `bundle create`
            command = command.commands["create"]
        options |= {name for one in command.params for name in one.opts + one.secondary_opts}
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert given <= options, words
        assert command is not tandem, words


@pytest.mark.slow
def test_the_commands_of_the_pages_run_in_the_order_of_the_site(tmp_path: Path) -> None:
    link_configs(tmp_path, pictures=8)
    pages = (
        "tutorials/first_detector.md",
        "calibrate.md",
        "plan.md",
        "build.md",
        "pipelines.md",
        "decoders.md",
        "bundles.md",
        "deploy.md",
        "costs.md",
    )
    blocks = [
        block
        for page in pages
        for block in re.findall(r"```bash\n(.*?)```", text_of(page), re.DOTALL)
    ]
    assert len(blocks) >= 8
    python = f'python() {{ "{sys.executable}" "$@"; }}'
    # The default method tries INT8 for half a minute; tests/cli/test_demo.py builds with it.
    tandem = """
        tandem() {
            case "$*" in
                *--method*) ;;
                *"--data configs/scenes/calibration"*) set -- "$@" --method minmax ;;
            esac
            python -m toolkit.cli "$@"
        }"""
    done = subprocess.run(
        ["bash", "-ec", "\n".join([python, tandem, *blocks])],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "robot.bundle").exists()
    lines = (tmp_path / "seen.jsonl").read_text().splitlines()
    assert len(lines) == 10  # that on pipelines overwrites those of the first page
