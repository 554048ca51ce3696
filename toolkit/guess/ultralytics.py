"""Models that Ultralytics' exporter wrote: its metadata names the task, the classes and more."""

from collections.abc import Callable, Mapping

from pipelines.decode_config import (
    Classification,
    ClassRows,
    Column,
    DecodeConfig,
    Depth,
    Rows,
    Segmentation,
    UltralyticsDetect,
    UltralyticsObb,
    UltralyticsPose,
    UltralyticsSegment,
)
from toolkit.guess.facts import ModelFacts
from toolkit.guess.names import class_names, numbers_of
from toolkit.guess.proposal import Candidate

_FINISHED_ROWS = {"detect": 6, "segment": 38, "obb": 7}
_CENTRE: tuple[Column, ...] = ("cx", "cy", "w", "h", "score", "class")


def candidates(facts: ModelFacts) -> tuple[Candidate, ...]:
    """Return the reading of an export of Ultralytics; none if it is no such export."""
    if facts.metadata.get("author") != "Ultralytics":
        return ()
    task = facts.metadata.get("task", "detect")
    why = f"metadata: author Ultralytics, task {task}"
    transformer = "GridSample" in facts.operators or "RTDETR" in facts.metadata.get("head", "")
    if task == "detect" and transformer:
        return _transformer(facts, why)
    if task in _FINISHED_ROWS or task == "pose":
        return _heads(facts, task, why)
    return _maps(facts, task, why)


def _transformer(facts: ModelFacts, why: str) -> tuple[Candidate, ...]:
    name = facts.outputs[0].name
    why += ", GridSample in the graph: RT-DETR, whose boxes are fractions"
    rows = Candidate(Rows(output=name, columns=_CENTRE, unit="fraction"), "stretch", why)
    classes = Candidate(ClassRows(output=name), "stretch", why)
    if facts.outputs[0].shape[-1] != 6:
        return (classes,)
    # 6 columns are score and class, or the scores of two classes (up to version 8.4.0).
    return (rows, classes) if len(class_names(facts.metadata)) == 2 else (rows,)


def _heads(facts: ModelFacts, task: str, why: str) -> tuple[Candidate, ...]:
    head = next((o for o in facts.outputs if len(o.shape) == 3), facts.outputs[0])
    protos = next((o.name for o in facts.outputs if len(o.shape) == 4), "")
    points, values = _keypoint_shape(facts)
    if _is_finished(facts, task, points * values):
        why += f", [1, rows, {head.shape[-1]}]: rows that need no suppression"
        columns: Mapping[str, DecodeConfig] = {
            "detect": Rows(output=head.name),
            "segment": Rows(output=head.name, masks=protos),
            "pose": Rows(
                output=head.name, keypoints=points, keypoint_values=3 if values == 3 else 2
            ),
            "obb": Rows(output=head.name, columns=(*_CENTRE, "angle")),
        }
        return (Candidate(columns[task], "letterbox", why),)
    raw: Mapping[str, Callable[[], DecodeConfig]] = {
        "detect": lambda: UltralyticsDetect(output=head.name),
        "segment": lambda: UltralyticsSegment(output=head.name, masks=protos),
        "pose": lambda: UltralyticsPose(
            output=head.name, keypoints=points, keypoint_values=3 if values == 3 else 2
        ),
        "obb": lambda: UltralyticsObb(output=head.name),
    }
    return (Candidate(raw[task](), "letterbox", f"{why}, channels before cells: a raw head"),)


def _is_finished(facts: ModelFacts, task: str, keypoints: int) -> bool:
    """True for rows of a known width, after NMS in the graph or from a head that needs none."""
    head = next((o for o in facts.outputs if len(o.shape) == 3), facts.outputs[0])
    columns = _FINISHED_ROWS.get(task, 6 + keypoints)
    return len(head.shape) == 3 and head.shape[-1] == columns


def _keypoint_shape(facts: ModelFacts) -> tuple[int, int]:
    """Return (points, values of each) of the metadata; COCO's 17 of 3 without."""
    shape = numbers_of(facts.metadata.get("kpt_shape", ""))
    return (shape[0], shape[1]) if len(shape) == 2 else (17, 3)


def _maps(facts: ModelFacts, task: str, why: str) -> tuple[Candidate, ...]:
    output = facts.outputs[0]
    if task == "classify":
        note = "resize: the short side is fitted and the centre cut out"
        decode = Classification(scores=output.name, softmax=False)
        return (Candidate(decode, "crop", f"{why}: softmax is in the graph", (note,)),)
    if task == "depth":
        return (Candidate(Depth(output=output.name, metric=True), "letterbox", why),)
    if task.startswith("sem"):
        decode_map = Segmentation(output=output.name, values="classes")
        return (Candidate(decode_map, "letterbox", f"{why}: the map holds classes"),)
    return ()
