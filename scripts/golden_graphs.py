"""Small graphs of `scripts/golden_engines.py`, in ONNX's text form, that large networks leave out.

A name that is declared with its shape and made by no node is a weight: random, from its name.
"""

import math
import zlib
from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser
from onnx import helper, numpy_helper

HEADER = '<ir_version: 9, opset_import: ["" : 19]>'
CONTRIBUTED_HEADER = '<ir_version: 9, opset_import: ["" : 19, "com.microsoft" : 1]>'

GRAPHS: Mapping[str, str] = {
    "rows": """(float[2,40,96] x, float[2,8,14,14] p) => (float a, float b, float c, float d) <
        float[96] s, float[96] t, float[8] u, float[8] v> {
        a = LayerNormalization<axis=-1>(x, s, t)
        b = Softmax<axis=-1>(x)
        c = InstanceNormalization(p, u, v)
        d = LRN<size=5>(p)
    }""",
    "attention": """(float[2,4,64,32] q, float[2,4,64,32] k, float[2,4,64,32] v) => (float y) <
        float[1] scale = {0.17}> {
        t = Transpose<perm=[0,1,3,2]>(k)
        a = MatMul(q, t)
        b = Mul(a, scale)
        c = Softmax<axis=-1>(b)
        y = MatMul(c, v)
    }""",
    "gathers": """(float[6,20,32] x, int64[6] i, float[6,20,32] z, int64[6,20,32] places) =>
        (float a, float b, float c) <
        float[2,20,32] updates, int64[2,1] at = {1,4}> {
        a = Gather<axis=0>(x, i)
        b = ScatterND(z, at, updates)
        r = Relu(x)
        c = GatherElements<axis=0>(r, places)
    }""",
    "moves": """(float[2,8,14,12] x) => (float a, float b, float c, float d) <
        int64[8] pads = {0,0,1,2,0,0,0,1}, float[4] scales = {1,1,2,1.5}, int64 axis = {3}> {
        a = Pad<mode="reflect">(x, pads)
        e = Identity(x)
        b = Resize<mode="linear">(e, , scales)
        c = CumSum(x, axis)
        d = Transpose<perm=[0,3,2,1]>(x)
    }""",
    "sampled": """(float[1,8,14,12] x, float[1,7,9,2] grid) => (float y) {
        y = GridSample<mode="bilinear">(x, grid)
    }""",
    "regions": """(float[2,8,14,12] x, float[5,4] rois, int64[5] images) => (float y) {
        y = RoiAlign<coordinate_transformation_mode="half_pixel", output_height=3, output_width=4,
            sampling_ratio=2, spatial_scale=0.5>(x, rois, images)
    }""",
    "reductions": """(float[2,40,96] x) => (float a, float b, int64 c, float d, int64 e, float f) <
        int64[1] last = {-1}, int64[1] k = {7}, int64[2] both = {0,1}> {
        a = ReduceMean<keepdims=0>(x, last)
        b = ReduceMax(x, both)
        c = ArgMax<axis=-1>(x)
        d, e = TopK<axis=-1>(x, k)
        f = ReduceL2(x, last)
    }""",
    "selected": """(float[2,9000] x) => (float a, int64 b) <int64[1] k = {50}> {
        a, b = TopK<axis=-1>(x, k)
    }""",
    "suppressed": """(float[1,64,80,80] x) => (float[n,4] y) <float[64,64,3,3] w, float[5,64,1,1] v,
        int64[2] parts = {4,1}, int64[3] rows = {1,-1,6400}, int64[1] most = {100},
        float[1] iou = {0.5}, int64[1] column = {2}, int64[1] last = {1}, int64[1] first = {0}> {
        c = Conv<pads=[1,1,1,1]>(x, w)
        r = Relu(c)
        o = Conv(r, v)
        b4, s4 = Split<axis=1>(o, parts)
        b3 = Reshape(b4, rows)
        b = Transpose<perm=[0,2,1]>(b3)
        s = Reshape(s4, rows)
        found = NonMaxSuppression(b, s, most, iou)
        t = Gather<axis=1>(found, column)
        places = Squeeze(t, last)
        all = Squeeze(b, first)
        y = Gather(all, places)
    }""",
    "volumes": """(float[1,8,10,12,14] x) => (float y, float z) <
        float[16,8,3,3,3] w, float[16] b, float[16,8,2,2,2] u> {
        c = Conv<pads=[1,1,1,1,1,1]>(x, w, b)
        r = Relu(c)
        y = AveragePool<kernel_shape=[2,2,2],strides=[2,2,2]>(r)
        z = ConvTranspose<strides=[2,2,2]>(y, u)
    }""",
    "four bits": """(float[1,128] x, float[20,128] z) => (float y, float v) <
        uint8[64,4,16] q, float[64,4] s> {
        y = com.microsoft.MatMulNBits<K=128,N=64,bits=4,block_size=32>(x, q, s)
        v = com.microsoft.MatMulNBits<K=128,N=64,bits=4,block_size=32>(z, q, s)
    }""",
    "unpooled": """(float[1,8,12,12] x) => (float y) {
        p, i = MaxPool<kernel_shape=[2,2],strides=[2,2]>(x)
        y = MaxUnpool<kernel_shape=[2,2],strides=[2,2]>(p, i)
    }""",
    "recurrent": """(float[6,3,24] x) => (float y, float h, float c, float g) <
        float[2,128,24] w, float[2,128,32] r, float[2,256] b,
        float[1,96,24] gw, float[1,96,32] gr, float[1,192] gb> {
        y, h, c = LSTM<hidden_size=32,direction="bidirectional">(x, w, r, b)
        g = GRU<hidden_size=32>(x, gw, gr, gb)
    }""",
    "pyramid": """(float[8,64,20,20] x, float[8,128,40,40] z) => (float y) <
        float[64,192,1,1] w, float[64] b, float[64,64,1,1] v, float[4] scales = {1,1,2,2}> {
        a = Relu(x)
        e = Relu(z)
        u = Resize<mode="nearest",coordinate_transformation_mode="asymmetric",nearest_mode="floor">
            (a, , scales)
        j = Concat<axis=1>(u, e)
        c = Conv(j, w, b)
        r = Relu(c)
        y = Conv(r, v)
    }""",
    "planes": """(float[4,64,28,28] x) => (float y) <
        float[64,1,5,5] w, float[64,1,3,3] v, float[96,64,1,1] u> {
        a = Conv<group=64,pads=[2,2,2,2]>(x, w)
        b = Relu(a)
        c = Conv<group=64,pads=[1,1,1,1]>(b, v)
        d = Clip(c)
        y = Conv(d, u)
    }""",
    "partly covered": """(float[8,16,256,256] x) => (float y) <
        float[16,16,3,3] w, float[16,16,3,3] v, int64[2] axes = {2,3}> {
        a = Conv<pads=[1,1,1,1]>(x, w)
        b = Relu(a)
        c = Det(b)
        e = Conv<pads=[1,1,1,1]>(b, v)
        f = Unsqueeze(c, axes)
        y = Add(e, f)
    }""",
    "rolling": """(float[batch,8,height,width] x) => (float y) <
        float[12,8,3,3] w, float[16,12,3,3] v, float[7,28,1,1] u, float[4] scales = {1,1,2,2}> {
        a = Conv<pads=[1,1,1,1],strides=[2,2]>(x, w)
        s = Sigmoid(a)
        fine = Mul(a, s)
        b = Conv<pads=[1,1,1,1],strides=[2,2]>(fine, v)
        coarse = Relu(b)
        up = Resize<mode="nearest",coordinate_transformation_mode="asymmetric",nearest_mode="floor">
            (coarse, , scales)
        both = Concat<axis=1>(up, fine)
        y = Conv(both, u)
    }""",
}


def graph_named(name: str) -> onnx.ModelProto:
    """Return a row of `GRAPHS` with its weights."""
    header = CONTRIBUTED_HEADER if "com.microsoft" in GRAPHS[name] else HEADER
    model = onnx.parser.parse_model(f"{header} graph {GRAPHS[name]}")
    graph = model.graph
    outputs = {output for node in graph.node for output in node.output}
    for value in list(graph.value_info):
        if value.name not in outputs:
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            weights = _weights(value.name, shape)
            if value.type.tensor_type.elem_type == onnx.TensorProto.UINT8:
                weights = np.frombuffer(weights.tobytes(), np.uint8)[: math.prod(shape)]
            weights = weights.reshape(shape)
            graph.initializer.append(numpy_helper.from_array(weights, value.name))
            graph.value_info.remove(value)
    for output in graph.output:  # their shapes are inferred
        kind = output.type.tensor_type.elem_type
        output.CopyFrom(helper.make_tensor_value_info(output.name, kind, None))
    return model


def _weights(name: str, shape: list[int]) -> np.ndarray:
    random = np.random.default_rng(zlib.crc32(name.encode()))
    spread = 1 / math.sqrt(max(1, math.prod(shape[1:])))
    return random.normal(0, spread, shape).astype(np.float32)
