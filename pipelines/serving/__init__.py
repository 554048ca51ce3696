"""A server of engines: KServe v2 (Open Inference Protocol) with Triton's extensions.

`protocol.py` has the values of a request and the refusals, `codec.py` tensors as bytes and JSON,
`messages.py` the messages of gRPC and of config.pbtxt, `http.py` and `grpc.py` the two ports,
`service.py` what both answer, `repository.py` the models on disk and their life,
`config_checks.py` what a configuration may not ask for, `warm_up.py` runs before a model is
ready, `model.py` one model's signature and runs, `scheduler.py` queues and batches, `metrics.py`
counts,
`shared_memory.py` the regions of clients, `ensemble.py` steps that pass tensors on, `server.py`
starts all of it.
"""
