"""Remarks on operators on the DLA that are not limits."""

from dataclasses import dataclass

from device.engine.manifest import Precision
from toolkit.dla.rules import ops as o
from toolkit.dla.rules.rule import (
    FAQ,
    FP16,
    GUIDE,
    GUIDE_85,
    HEADER,
    INT8,
    MATRIX,
    V1,
    V2,
    Certainty,
    Generation,
    Situation,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A remark and where it applies; `ops` None: every operator that the DLA supports."""

    id: str
    ops: frozenset[str] | None
    text: str
    source: str
    generations: tuple[Generation, ...] = ("v1", "v2")
    precisions: tuple[Precision, ...] = ("fp16", "int8")
    certainty: Certainty = "documented"


# fmt: off
NOTES: tuple[Note, ...] = (
    Note(id="note.rounding", ops=None, precisions=INT8, source="TensorRT issue 2222",
         text="INT8 rounds ties away from zero; other engines may differ by one step",
         certainty="observed"),
    Note(id="note.sparse", ops=o.CONV, generations=V2, precisions=INT8, source=FAQ,
         text="weights with 2 of 4 zero along the channels run faster from 65 channels on"),
    Note(id="note.fp16-convolution", ops=o.WEIGHTED, generations=V2, precisions=FP16, source=FAQ,
         text="FP16 convolutions can be up to twice as slow as on Xavier"),
    Note(id="note.deconv", ops=o.DECONV, generations=V1, source="TensorRT issue 1700",
         text="wrong results have been seen on Xavier: compare with the GPU", certainty="observed"),
    Note(id="note.equal-ranges", ops=o.POOL | o.ops("Add Sum Sub Mul Max Concat"), precisions=INT8,
         source=HEADER,
         text="INT8 wants equal ranges (poolings: input and output; sums: operands; "
              "concatenations: all); the build makes them equal"),
    Note(id="note.raised", ops=o.ops("Sigmoid Tanh LRN Softmax"), precisions=INT8,
         source=GUIDE_85, text="TensorRT raises it to FP16 in INT8 engines"),
    Note(id="note.leaky", ops=o.ops("LeakyRelu"), source=f"{HEADER}; {GUIDE}; {MATRIX}",
         text="the header does not list it; guide and matrix do"),
    Note(id="note.div-pow", ops=o.ops("Div Pow"), source=f"{HEADER} (11.1 alike); {GUIDE}",
         text="headers do not list it; the guide does, and logs of older versions refuse DIV"),
    Note(id="note.pow-max", ops=o.ops("Pow ReduceMax"), source=MATRIX, certainty="recalled",
         text="its row of the matrix was renamed by mistake; the version is inferred"),
    Note(id="note.softmax", ops=o.ops("Softmax"), source=HEADER,
         text="exact only where all other dimensions are 1; else less so towards 1024"),
    Note(id="note.fp19", ops=o.BINARY | o.ops("BatchNormalization"), generations=V2,
         source="TensorRT guide, inference on Orin",
         text="constants lie in 4 bytes each, channels filled up to 16 (FP16) or 32 (INT8)"),
    Note(id="note.probe", ops=None, source=HEADER,
         text="headers lag behind the guide: canRunOnDLA on the board has the last word"),
)
# fmt: on


def notes_on(op: str, situation: Situation) -> tuple[Note, ...]:
    """Return the remarks on an operator that the DLA may take, in a situation."""
    if op not in o.NATIVE:
        return ()
    return tuple(
        note
        for note in NOTES
        if (note.ops is None or op in note.ops)
        and situation.generation in note.generations
        and situation.precision in note.precisions
    )
