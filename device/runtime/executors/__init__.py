"""Ways to run one segment of an engine on this machine.

protocol               what the session needs of an executor
table                  the executors, best first, and the choice among them
cuda, cuda_profiler    cubins on an NVIDIA GPU, and their times
tensorrt               plans of TensorRT on a DLA core
tensorrt_gpu           plans of TensorRT on the GPU
portable               onnxruntime on the CPU
emulated               the DLA's INT8 arithmetic in software, on request
"""
