"""A rollout as a pure machine: events in, a new state and actions out, and the same again later.

values     what it is made of: spec, state, events, actions
machine    what each event does, as tables and one function for each
judge      whether a group has passed, on what a machine knows
gates      `p95_latency_ms<30, errors<1%`: rows, judged on what the devices measured
targets    which devices fit a release, and why the others do not
groups     `canary,5%,rest`: which device is in which group
rates      devices a minute
policy     maintenance windows, and the gates that a device holds to by itself
liveness   whether a device is alive
reports    what a device's report means to its rollout
waits      times and durations, as they are written and shown
routing    several rollouts: a newer one takes devices over
"""
