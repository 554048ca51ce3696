"""What an ONNX file says about where it comes from, read before anything is converted."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

# The dynamo exporter of PyTorch names the modules that each node comes from.
_HIERARCHY = "pkg.torch.onnx.class_hierarchy"
_CLASS = re.compile(r"'([A-Za-z_][\w.]*)'")


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """The file's words about itself; none of them is checked.

    `metadata`: the model's metadata. `classes`: the outermost Python classes of its nodes, such as
    "torchvision.models.resnet.ResNet", where the exporter wrote them.
    """

    producer: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    classes: frozenset[str] = frozenset()


def model_origin(proto: onnx.ModelProto) -> ModelOrigin:
    """Return what a model says about its origin."""
    classes = set()
    for node in proto.graph.node:
        for entry in node.metadata_props:
            if entry.key == _HIERARCHY and (outermost := _CLASS.search(entry.value)):
                classes.add(outermost[1])
    return ModelOrigin(
        producer=proto.producer_name,
        metadata={entry.key: entry.value for entry in proto.metadata_props},
        classes=frozenset(classes),
    )
