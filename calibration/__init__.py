"""INT8 activation ranges from real data; knows arrays and names, never the graph."""
