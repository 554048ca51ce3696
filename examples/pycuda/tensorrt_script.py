"""A TensorRT script as many are: memory and copies by pycuda, one inference on one stream.

    python tensorrt_script.py model.plan image.npy scores.npy

tandem_script.py beside it does the same with Tandem: compare the two.
"""

import sys

import numpy as np
import pycuda.autoinit  # noqa: F401
import pycuda.driver as cuda
import tensorrt as trt


def main(engine_file: str, input_file: str, output_file: str) -> None:
    logger = trt.Logger(trt.Logger.WARNING)
    with open(engine_file, "rb") as file:
        engine = trt.Runtime(logger).deserialize_cuda_engine(file.read())
    context = engine.create_execution_context()

    stream = cuda.Stream()
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    host, memory = {}, {}
    for name in names:
        shape, dtype = tuple(engine.get_tensor_shape(name)), engine.get_tensor_dtype(name)
        host[name] = cuda.pagelocked_empty(shape, trt.nptype(dtype))
        memory[name] = cuda.mem_alloc(host[name].nbytes)
        context.set_tensor_address(name, int(memory[name]))

    image, scores = names
    host[image][...] = np.load(input_file)
    cuda.memcpy_htod_async(memory[image], host[image], stream)
    context.execute_async_v3(stream.handle)
    cuda.memcpy_dtoh_async(host[scores], memory[scores], stream)
    stream.synchronize()
    np.save(output_file, host[scores])
    print(f"{scores} {host[scores].shape}: largest at {host[scores].argmax()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
