"""Rules of the DLA, first part: versions, precisions, operators, and limits of every tensor."""

from toolkit.dla.rules import general_checks as c
from toolkit.dla.rules import ops as o
from toolkit.dla.rules.rule import (
    ALL_PRECISIONS,
    FLOOR,
    NEVER,
    NEWEST,
    YES,
    AtMost,
    OneOf,
    Rule,
    Within,
)
from toolkit.dla.rules.sources import (
    FP16,
    GUIDE,
    GUIDE_85,
    HEADER,
    HEADER_85,
    JETPACKS,
    MATRIX,
    V1,
    V2,
)
from toolkit.graph.node_view import NodeView

ALL = None
BATCH_HINT = "run a smaller batch: the DLA does not gain from a larger one"
CUT_HINT = "cut the graph before the reshape and post-process on the GPU or the CPU"

# fmt: off
GENERAL_RULES: tuple[Rule[NodeView], ...] = (
    # Precision, version and operator: no other parameter helps.
    Rule(id="G1", ops=ALL, limit="the DLA computes in FP16 and INT8 only",
         facts=c.stated("precision FP32"), allowed=NEVER, precisions=("fp32",), source=GUIDE,
         hint="build with --precision int8"),
    Rule(id="G11", ops=ALL, limit="TensorRT 10.8 to 11.4.0 has no DLA on Jetson",
         facts=c.stated("this TensorRT"), allowed=NEVER, precisions=ALL_PRECISIONS,
         tensorrt=((10, 8), (11, 4, 1)), source="TensorRT support matrices and release notes",
         hint="use JetPack 6 (TensorRT 10.3), or TensorRT 11.4.1 and newer"),
    Rule(id="version.v1", ops=ALL, limit="the last TensorRT of Xavier is 8.5.2 (JetPack 5)",
         facts=c.stated("this TensorRT"), allowed=NEVER, precisions=ALL_PRECISIONS, generations=V1,
         tensorrt=((8, 6), NEWEST), source=JETPACKS, hint="use TensorRT 8.5.2"),
    Rule(id="version.v2", ops=ALL, limit="the first TensorRT of Orin is 8.4 (JetPack 5)",
         facts=c.stated("this TensorRT"), allowed=NEVER, precisions=ALL_PRECISIONS, generations=V2,
         tensorrt=(FLOOR, (8, 4)), source=JETPACKS, hint="use TensorRT 8.5.2 and newer"),
    Rule(id="G13", ops=ALL, limit="plugins, loops and conditionals never run on the DLA",
         facts=c.plain, allowed=YES, source=HEADER),
    Rule(id="op.rewrite", ops=o.with_status("rewrite"),
         limit="it needs a rewrite into operators that the DLA takes",
         facts=c.operator, allowed=NEVER, source=MATRIX, hint=o.HINTS),
    Rule(id="op.folded", ops=o.with_status("folded"),
         limit="it is computed while building and never runs on the DLA",
         facts=c.operator, allowed=NEVER, source=MATRIX),
    Rule(id="op.not-exposed", ops=o.with_status("not exposed"),
         limit="TensorRT does not offer it on the DLA",
         facts=c.operator, allowed=NEVER, source=MATRIX, hint=o.HINTS),
    Rule(id="op.unsupported", ops=ALL, limit="the DLA takes only operators of its matrix",
         facts=c.operator, allowed=OneOf(tuple(o.STATUS)), source=MATRIX, hint=o.HINTS),
    # Pow and ReduceMax stand here by inference: see ops.
    Rule(id="op.version", ops=o.FROM_8_6_12, limit="the DLA takes it from TensorRT 8.6.12 on",
         facts=c.operator, allowed=NEVER, tensorrt=(FLOOR, (8, 6, 12)), source=MATRIX,
         hint=o.HINTS),
    Rule(id="min.conflict", ops=o.ops("Min"),
         limit="the operator matrix says that TensorRT does not offer it on the DLA",
         facts=c.operator, allowed=NEVER, hint=o.HINTS,
         source=f"{MATRIX}; {HEADER} and the guide list ElementWise MIN: the cautious reading"),
    Rule(id="unary.kind", ops=o.UNARY, limit="of the unary operators the DLA has {} for certain",
         facts=c.operator, allowed=OneOf(("Abs",)),
         source=f"{HEADER} (11.1 alike); {MATRIX} has Atanh, Cos and Sin from 8.6.12 on, in INT8: "
                "the cautious reading"),
    Rule(id="softmax.v1", ops=o.ops("Softmax"), limit="the DLA of Xavier has no softmax",
         facts=c.operator, allowed=NEVER, generations=V1, source=HEADER_85),
    Rule(id="sub.version", ops=o.ops("Sub"), limit="the DLA takes it from TensorRT 8.2 on",
         facts=c.operator, allowed=NEVER, tensorrt=(FLOOR, (8, 2)),
         source="NvInfer.h 8.0.1 without kSUB, 8.2.1 with it", hint=o.HINTS),
    Rule(id="slice.v1", ops=o.CUT, limit="only the DLA of Orin slices",
         facts=c.operator, allowed=NEVER, generations=V1, source=GUIDE_85, certainty="observed"),
    Rule(id="unary.v1", ops=o.UNARY, limit="only the DLA of Orin has it",
         facts=c.operator, allowed=NEVER, generations=V1, source=MATRIX),
    Rule(id="shuffle.v1", ops=o.SHUFFLE, limit="only the DLA of Orin reshapes and transposes",
         facts=c.operator, allowed=NEVER, generations=V1, source=MATRIX),
    Rule(id="shuffle.version", ops=o.SHUFFLE, limit="the DLA takes it from TensorRT 8.5 on",
         facts=c.operator, allowed=NEVER, tensorrt=(FLOOR, (8, 5)), source=MATRIX),
    Rule(id="reduce.v1", ops=o.REDUCE, limit="only the DLA of Orin reduces",
         facts=c.operator, allowed=NEVER, generations=V1, source=MATRIX),
    Rule(id="compare.precision", ops=o.COMPARE, limit="comparisons run in INT8 only",
         facts=c.stated("{} in FP16"), allowed=NEVER, precisions=FP16, source=GUIDE),

    # Tensors.
    Rule(id="G5", ops=ALL, limit="every dimension must be one fixed number",
         facts=c.fixed_shapes, allowed=YES, source=HEADER,
         hint="freeze the dynamic dimensions at import"),
    Rule(id="G1.type", ops=o.NATIVE, limit="tensors must be FP32 or FP16 in the model",
         facts=c.types, allowed=OneOf(("float32", "float16")), source=GUIDE),
    Rule(id="G2", ops=o.NATIVE, limit="the batch (all dimensions but C, H, W) must be {}",
         facts=c.batch, allowed=AtMost(4096), source=GUIDE, hint=BATCH_HINT),
    Rule(id="G2.v1", ops=o.NATIVE, limit="the batch must be {} on Xavier",
         facts=c.batch, allowed=AtMost(32), generations=V1, source="TensorRT issue 2318",
         certainty="observed", hint=BATCH_HINT),
    Rule(id="G4", ops=o.NATIVE, limit="dimensions other than the batch must be {}",
         facts=c.dimensions, allowed=Within(1, 8192), source=GUIDE,
         hint=dict.fromkeys(o.SHUFFLE | o.CUT | o.ops("Concat"), CUT_HINT)),
    Rule(id="G10", ops=o.NATIVE, limit="a tensor must have fewer than 2^31 elements",
         facts=c.volumes, allowed=AtMost(2**31 - 1), source=HEADER),
    Rule(id="G16", ops=o.WEIGHTED | o.ops("BatchNormalization"), limit="weights must be constant",
         facts=c.weights, allowed=YES, source=MATRIX),
    Rule(id="G17", ops=o.NATIVE, limit="constants must be {}, the largest of FP16",
         facts=c.magnitudes, allowed=AtMost(65504), source=GUIDE),
)
# fmt: on
