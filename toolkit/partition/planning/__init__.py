"""The plan: what runs where and why, from rules, costs and the solver.

refusals                       which nodes the DLA refuses, and why
formulate, loadables           graph, rules and costs -> the problem that the solver takes
objectives                     what a plan can be best at
forced                         nodes that the user places
placement                      solves it; a reason for every node
margin                         takes back moves that gain less than the model's own error
plan, segments, segment_costs, workload    the plan of one or several models, its segments
services                       programs of other runtimes: their memory, and their load on the GPU
portable                       cuts segments where the GPU backend has no kernel
advice, figures, verdict       what to change; the plan beside GPU only and DLA with fallback
cycles, rates, traffic         clocks of DLA layers; frames simulated with contention
batch                          the frames of a run, and how they were chosen
plan_text, plan_json, plan_html    the plan shown; quantities in units that are read
trtexec, trtexec_flags         the plan as options of trtexec; which trtexec has which
"""
