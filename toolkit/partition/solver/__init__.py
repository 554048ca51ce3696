"""Find the processor of every task: exact solver and simulator. Independent of ONNX.

problem         values of a placement problem and its solution
solve           the best placement, proven or with a gap
milp            a mixed-integer linear program, solved by HiGHS
milp_placement  the program of every objective but the makespan
milp_makespan   the program of the makespan
makespan        the shortest time of one frame of each network: restricted answers first
chain_search    the makespan by states, exact for chains
pair_search     the makespan of two networks with a DLA core for each, exact
steps           all ways in which one network can run on the GPU and a core of its own
jobs            segments in an order, and their schedule
intervals       heuristic placements to start from
baselines       placements without a solver
precisions      INT8 or FP16 for each kernel of a GPU
segmentation    segments and connected components of a placement
assess          segments, crossings, latency, load and energy of a placement
simulate        discrete-event simulation under traffic
"""
