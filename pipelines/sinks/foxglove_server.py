"""Live view in Foxglove: the messages of a recording over its WebSocket protocol."""

import logging

from device.errors import PipelineError
from pipelines.ros2 import messages as kinds
from pipelines.ros2.cdr import Message, encode
from pipelines.ros2.messages import message_text
from pipelines.sink_config import FoxgloveSink
from pipelines.sinks.recording import DIAGNOSTICS, RecordingOut
from pipelines.sinks.result import SinkContext

try:
    from foxglove import Channel, Context, Schema, start_server
except ImportError as error:
    raise PipelineError(
        "the foxglove sink needs the package foxglove-sdk, which is not installed: pip install"
        " 'tandem-edge[foxglove]'."
    ) from error

_log = logging.getLogger(__name__)

BACKLOG = 64  # messages that a slow viewer may be behind; then its oldest are dropped


class FoxgloveOut(RecordingOut):
    """A server for any number of viewers; pictures are encoded while one of them wants them."""

    def __init__(self, config: FoxgloveSink, context: SinkContext) -> None:
        """Listen. Raises PipelineError."""
        super().__init__("foxglove", config, context)
        # Others in this process may use the library, too. Channels end with their context.
        self._context = server_context = Context()
        topics = {DIAGNOSTICS: kinds.DIAGNOSTICS}
        for of_camera in self._topics.values():
            topics |= {topic: kind for topic, kind, _ in of_camera}
        self._channels = {
            topic: Channel(
                topic,
                message_encoding="cdr",
                schema=Schema(name=kind, encoding="ros2msg", data=message_text(kind).encode()),
                context=server_context,
            )
            for topic, kind in topics.items()
        }
        try:
            self._server = start_server(
                name="tandem",
                host=config.host,
                port=config.port,
                context=server_context,
                message_backlog_size=BACKLOG,
            )
        except (OSError, RuntimeError) as error:
            raise PipelineError(
                f"the foxglove sink cannot listen on {config.host}:{config.port} ({error}): give"
                " another `port`, or end what uses it."
            ) from error
        _log.info("live view: %s", self._server.app_url())

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return self._server.port

    def is_wanted(self, topic: str) -> bool:
        """Return whether a viewer subscribes to a topic."""
        return self._channels[topic].has_sinks()

    def put(self, topic: str, kind: str, message: Message, wall_ns: int, seq: int) -> None:
        """Send a message to those that want it."""
        self._channels[topic].log(encode(kind, message), log_time=wall_ns)

    def close(self) -> None:
        """Stop the server."""
        self._server.stop()
