"""A DLA segment in software: from its Q/DQ graph to the INT8 layers of `device.dla`."""
