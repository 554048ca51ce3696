"""What only the hardware can prove: `tandem-agent selftest` on a board, one file back.

kit         the kit that the host made: engines with known outputs, cases of DLA rules, networks
report      the file that comes back: what may be in it, written and read with checks
private     what must not be in it: names, addresses and paths are replaced
sensors     power by rail, clocks and memory, from the board's files
steps       the steps of a selftest, as rows, with their limits
runner      each step in child processes: a crash loses one item of one step
child       what runs in such a process
kernels     engines on the GPU: the outputs of every tactic beside the known ones
rules       one DLA rule's case: what TensorRT says of it
dla         an engine on the DLA: its outputs, for the emulator
networks    one network: finished and timed, with power
tactics     a part of an engine's tactics, timed for a farm
job         some items of a kit that is one file, for a farm: the report on stdout
demo        the demo pipeline
machine     the board: versions, cores, clocks, memory
__main__    `python -m device.selftest`
"""
