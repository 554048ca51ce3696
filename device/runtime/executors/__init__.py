"""Ways to run one segment of an engine on this machine, one file each."""
