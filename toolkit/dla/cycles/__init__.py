"""Cycles of a DLA as a pure function of layer and configuration, independent of the toolkit.

    layer = ConvLayer(channels=64, height=56, width=56, kernels=64, kernel=(3, 3), pads=(1,) * 4)
    cycles = estimate(layer, CONFIGURATIONS["xavier"], bytes_per_clock=20.0)
    cycles.total, cycles.bound_by, cycles.mac, cycles.memory, cycles.bytes_read, cycles.chunks

Layers (`layers.py`; pairs are (rows, columns), `precision` is "int8" or "fp16"):
    ConvLayer(channels, height, width, kernels, kernel, stride, pads, dilation, groups, batch,
        precision, image, eltwise "x"|"y"|None, table, pool); fully connected: output 1x1
    Deconvolution(channels, height, width, kernels, kernel, stride, groups, batch, precision)
    Pointwise(channels, height, width, operands, stage "x"|"y", batch, precision): sum, table, copy
    Pool(channels, height, width, kernel, stride, pads, batch, precision)
    Lrn(channels, height, width, batch, precision)
Functions (`estimate.py`, `result.py`, `convolution.py`):
    estimate(layer, config, *, bytes_per_clock) -> Cycles
    all_modes(the same) -> list[Cycles]: all modes, of which `estimate` returns the fastest
Configurations (`configurations.py`): CONFIGURATIONS[name] -> Config, where name is nv_full,
    nv_large, nv_medium_1024_full, nv_medium_512, nv_small_256, nv_small_256_full, nv_small, xavier
    or orin. Vary them with dataclasses.replace. Free parameters: mac_efficiency, memory_efficiency,
    overlap, layer_overhead, depthwise_channels, uses_winograd; for orin all that is inferred.
Sources (`sources.py`): source_of(name, field) -> Source(certainty, text)
Result (`result.py`): Cycles(mode, weight_mode, mac, data, weights, fill, output_stage, memory,
    overhead, optimistic, pessimistic, total, bound_by, bytes_read, bytes_written,
    bytes_refetched, chunks, hardware_layers, macs), where bound_by is "MACs", "weights streaming",
    "buffer", "output stage" or "memory".
Internals: `conv_modes.py` modes of the MAC array; `sequence.py` its clocks; `buffer.py` the
    convolution buffer; `post_processing.py` output stage, pooling and normalisation units;
    `standalone_layers.py` layers without the array.
"""
