"""Doubles of NVIDIA's GStreamer elements, for machines without a Jetson.

They have the names, the pads, the caps and the properties that pipelines use, and refuse what the
real ones refuse: frames are in NVMM memory between them, and nothing but nvvidconv takes them out
of it. What they cannot show: speed, and what the hardware does to a picture. Run as a program,
under the system's Python, which has GStreamer's bindings, this is the child process of a capture
with these elements in its registry.
"""

import sys
from pathlib import Path

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstBase", "1.0")
from gi.repository import GObject, Gst, GstBase  # noqa: E402

Gst.init(None)
NVMM = "video/x-raw(memory:NVMM),format=NV12"
RAW = "video/x-raw,format={NV12,I420,GRAY8,BGRx}"


def template(name, direction, caps):
    return Gst.PadTemplate.new(name, direction, Gst.PadPresence.ALWAYS, Gst.Caps.from_string(caps))


def renamed(caps, features):
    """Return caps in another memory, or in system memory for None."""
    result = Gst.Caps.new_empty()
    for at in range(caps.get_size()):
        one = Gst.Caps.new_empty()
        one.append_structure(caps.get_structure(at).copy())
        if features is not None:
            one.set_features(0, Gst.CapsFeatures.from_string(features))
        result.append(one)
    return result


class Remember(GstBase.BaseTransform):
    """Says that the frames are in NVMM memory; they stay where they are."""

    __gstmetadata__ = ("Double of NVMM", "Filter", "into NVMM", "tests")
    __gsttemplates__ = (
        template("sink", Gst.PadDirection.SINK, "video/x-raw,format=NV12"),
        template("src", Gst.PadDirection.SRC, NVMM),
    )

    def do_transform_caps(self, direction, caps, known):
        into = direction == Gst.PadDirection.SINK
        result = renamed(caps, "memory:NVMM" if into else None)
        return result if known is None else known.intersect(result)

    def do_transform_ip(self, buffer):
        return Gst.FlowReturn.OK


class Forget(GstBase.BaseTransform):
    """nvvidconv's way out of NVMM memory. It turns no picture: flip-method is checked alone."""

    __gstmetadata__ = ("Double of nvvidconv", "Filter/Converter/Video", "out of NVMM", "tests")
    __gsttemplates__ = (
        template("sink", Gst.PadDirection.SINK, NVMM),
        template("src", Gst.PadDirection.SRC, "video/x-raw,format=NV12"),
    )
    flip_method = GObject.Property(type=int, default=0, minimum=0, maximum=7, nick="flip-method")

    def do_transform_caps(self, direction, caps, known):
        into = direction == Gst.PadDirection.SINK
        result = renamed(caps, None if into else "memory:NVMM")
        return result if known is None else known.intersect(result)

    def do_transform_ip(self, buffer):
        return Gst.FlowReturn.OK


class Argus(Gst.Bin):
    """nvarguscamerasrc: sensors 0 and 1 are there, others are not."""

    __gstmetadata__ = ("Double of nvarguscamerasrc", "Source/Video", "a CSI camera", "tests")
    __gsttemplates__ = (template("src", Gst.PadDirection.SRC, NVMM),)

    def __init__(self):
        super().__init__()
        self._sensor = 0
        source, memory = Gst.ElementFactory.make("videotestsrc"), Remember()
        source.set_property("is-live", True)
        for element in (source, memory):
            self.add(element)
        source.link(memory)
        self.add_pad(Gst.GhostPad.new("src", memory.get_static_pad("src")))

    @GObject.Property(type=int, default=0, minimum=0, maximum=255, nick="sensor-id")
    def sensor_id(self):
        return self._sensor

    @sensor_id.setter
    def set_sensor_id(self, value):
        self._sensor = value

    def do_change_state(self, change):
        if change == Gst.StateChange.READY_TO_PAUSED and self._sensor > 1:
            error = GObject.GError("No cameras available")
            self.post_message(Gst.Message.new_error(self, error, "sensor-id is not there"))
            return Gst.StateChangeReturn.FAILURE
        return Gst.Bin.do_change_state(self, change)


class Decoder(Gst.Bin):
    """nvv4l2decoder: H.264 into NVMM memory."""

    __gstmetadata__ = ("Double of nvv4l2decoder", "Codec/Decoder/Video", "H.264", "tests")
    __gsttemplates__ = (
        template("sink", Gst.PadDirection.SINK, "video/x-h264"),
        template("src", Gst.PadDirection.SRC, NVMM),
    )
    enable_max_performance = GObject.Property(
        type=bool, default=False, nick="enable-max-performance"
    )

    def __init__(self):
        super().__init__()
        names = ("avdec_h264", "videoconvert")
        first, second = (Gst.ElementFactory.make(name) for name in names)
        first.set_property("max-threads", 1)
        memory = Remember()
        for element in (first, second, memory):
            self.add(element)
        first.link(second)
        second.link(memory)
        self.add_pad(Gst.GhostPad.new("sink", first.get_static_pad("sink")))
        self.add_pad(Gst.GhostPad.new("src", memory.get_static_pad("src")))


ELEMENTS = {
    "nvarguscamerasrc": Argus,
    "nvv4l2decoder": Decoder,
    "nvvidconv": Forget,
}

if __name__ == "__main__":
    for kind in (Remember, *ELEMENTS.values()):
        GObject.type_register(kind)
    for name, kind in ELEMENTS.items():
        assert Gst.Element.register(None, name, Gst.Rank.NONE, kind)
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from pipelines.sources.gst_process import main

    sys.exit(main(sys.argv))
