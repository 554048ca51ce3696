"""The script beside it with Tandem: memory and copies by pycuda, one inference on one stream.

    python tandem_script.py model.engine image.npy scores.npy

The engine is one of `tandem build`; autoprimaryctx is the context that all libraries share.
"""

import sys

import numpy as np
import pycuda.autoprimaryctx  # noqa: F401
import pycuda.driver as cuda

import tandem


def main(engine_file: str, input_file: str, output_file: str) -> None:
    session = tandem.open_session(engine_file)

    stream = cuda.Stream()
    names = [tensor.name for tensor in (*session.inputs, *session.outputs)]
    host, memory = {}, {}
    for name, tensor in zip(names, (*session.inputs, *session.outputs), strict=True):
        host[name] = cuda.pagelocked_empty(tensor.shape, tensor.dtype)
        memory[name] = cuda.mem_alloc(host[name].nbytes)
    arrays = {n: tandem.DeviceArray(memory[n], host[n].shape, host[n].dtype) for n in names}

    image, scores = names
    host[image][...] = np.load(input_file)
    cuda.memcpy_htod_async(memory[image], host[image], stream)
    session.infer_on_device({image: arrays[image]}, {scores: arrays[scores]}, stream=stream)
    cuda.memcpy_dtoh_async(host[scores], memory[scores], stream)
    stream.synchronize()
    np.save(output_file, host[scores])
    print(f"{scores} {host[scores].shape}: largest at {host[scores].argmax()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
