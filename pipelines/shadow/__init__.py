"""Shadow mode: a new release sees live frames beside the one that runs, and is compared with it.

tap          in the running pipeline: hands out a frame with its result when a shadow asks for one
wire         how a frame and its result go from one process to the other
agreement    how far two results agree: pure functions
compare      the new release's side: its network on the same frames
__main__     the shadow process, `python -m pipelines.shadow`
"""
