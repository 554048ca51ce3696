"""Clients of others, unmodified: kserve's two, and gRPC from JavaScript; each in an environment of
its own, that pip or npm fills."""

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from serving_fixtures import served, write_repository
from tritonclient.grpc import model_config_pb2, service_pb2

from pipelines.serving.server import Ports

KSERVE = """
import asyncio, sys
import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig

http, grpc = sys.argv[1:]
data = np.arange(16, dtype=np.int32).reshape(1, 16)

def inputs(binary):
    rows = [InferInput(f"INPUT{i}", [1, 16], "INT32") for i in (0, 1)]
    for one in rows:
        one.set_data_from_numpy(data, binary_data=binary)
    return rows

def check(answer):
    assert np.array_equal(answer.outputs[0].as_numpy().reshape(1, 16), 2 * data), answer

async def main():
    url = f"http://127.0.0.1:{http}"
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await rest.is_server_live(url)
    assert await rest.is_server_ready(url)
    assert await rest.is_model_ready(url, "simple")
    for binary in (False, True):
        check(await rest.infer(url, InferRequest("simple", inputs(binary)), model_name="simple"))
    await rest.close()
    client = InferenceGRPCClient(f"127.0.0.1:{grpc}")
    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready("simple")
    for binary in (False, True):
        check(await client.infer(InferRequest("simple", inputs(binary))))
    await client.close()

asyncio.run(main())
"""

JAVASCRIPT = """
const fs = require("fs"), grpc = require("@grpc/grpc-js"), loader = require("@grpc/proto-loader");
const [port, http, descriptors] = process.argv.slice(2);
const loaded = loader.loadFileDescriptorSetFromBuffer(fs.readFileSync(descriptors));
const Service = grpc.loadPackageDefinition(loaded).inference.GRPCInferenceService;
const client = new Service(`127.0.0.1:${port}`, grpc.credentials.createInsecure());
const call = (name, request) => new Promise((answer, fail) =>
  client[name](request, (error, value) => error ? fail(error) : answer(value)));
const data = Buffer.alloc(64);
for (let i = 0; i < 16; i++) data.writeInt32LE(i, 4 * i);
const inputs = ["INPUT0", "INPUT1"].map(name => ({name, datatype: "INT32", shape: [1, 16]}));
(async () => {
  const result = {
    live: (await call("ServerLive", {})).live,
    platform: (await call("ModelMetadata", {name: "simple"})).platform,
  };
  const answer = await call("ModelInfer",
    {model_name: "simple", inputs, raw_input_contents: [data, data]});
  result.sum = answer.raw_output_contents[0].readInt32LE(60);
  try { await call("ModelInfer", {model_name: "none"}); }
  catch (error) { result.refused = error.code; }
  const url = `http://127.0.0.1:${http}/v2/models/simple/infer`;
  const rows = inputs.map(one => ({...one, data: [...Array(16).keys()]}));
  const posted = await fetch(url, {method: "POST", body: JSON.stringify({inputs: rows})});
  result.fetched = (await posted.json()).outputs[0].data[15];
  console.log(JSON.stringify(result));
})();
"""


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    with served(write_repository(tmp_path_factory.mktemp("repository"))) as ports:
        yield ports


def run(command: list[str | Path], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="kserve 0.21 takes Python below 3.14")
def test_clients_of_kserve(tmp_path: Path, ports: Ports) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run([python, "-m", "pip", "install", "--quiet", "kserve==0.21.0"], tmp_path)
    run([python, "-c", KSERVE, str(ports.http), str(ports.grpc)], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_a_client_in_javascript(tmp_path: Path, ports: Ports) -> None:
    packages = ("@grpc/grpc-js@1", "@grpc/proto-loader@0.8")
    run(["npm", "install", "--no-audit", "--no-fund", *packages], tmp_path)
    files = (model_config_pb2, service_pb2)
    descriptors = FileDescriptorSet()
    for one in files:
        one.DESCRIPTOR.CopyToProto(descriptors.file.add())
    (tmp_path / "descriptors").write_bytes(descriptors.SerializeToString())
    (tmp_path / "client.js").write_text(JAVASCRIPT)
    words = (str(ports.grpc), str(ports.http), "descriptors")
    answer = json.loads(run(["node", "client.js", *words], tmp_path))
    assert answer == {
        "live": True, "platform": "tandem_engine", "sum": 30, "refused": 5, "fetched": 30,
    }  # fmt: skip
