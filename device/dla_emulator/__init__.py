"""A DLA segment in software: from its Q/DQ graph to the integer layers of `arithmetic`."""
