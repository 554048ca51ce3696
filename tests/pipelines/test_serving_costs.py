"""What a server spends beside its models: memory and the thread of its event loop."""

import subprocess
import sys
from pathlib import Path

from onnx import TensorProto
from serving_fixtures import identity

REQUESTS = 20_000
COUNT_GARBAGE = f"""
import asyncio, gc, sys, weakref
from pathlib import Path
from pipelines.serving.server import ServeOptions, serve

class Cycle:
    def __init__(self):
        self.itself = self

gc.set_threshold(200_000, 10, 10)  # as the command line has it
alive = weakref.WeakSet()
stop = asyncio.Event()

def on_ready(ports):
    assert ports.models == ("one",)
    for _ in range({REQUESTS}):
        alive.add(Cycle())
    print(len(alive))
    stop.set()

options = ServeOptions(
    repository=Path(sys.argv[1]), http_port=0, grpc_port=None, metrics_port=None
)
asyncio.run(serve(options, stop, on_ready))
print(gc.get_threshold())
"""


def test_garbage_of_requests_is_collected_while_the_server_runs(tmp_path: Path) -> None:
    identity(tmp_path, "one", TensorProto.FLOAT, ["n"])
    command = [sys.executable, "-c", COUNT_GARBAGE, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    alive, thresholds = run.stdout.splitlines()
    assert int(alive) < REQUESTS // 4
    assert thresholds == "(200000, 10, 10)"
