"""HTML pages of one style: each is one file, with its style and script inside.

`markup.py`: text, tables, figures as escaped HTML. `charts.py`: histograms, bars, steps, rooflines.
`layout.py`: where the nodes of a graph lie. `graph.py`: the graph as SVG, with search, zoom and the
facts of each node. `page.py`: the frame; `style.css` and `page.js` go into every page.
"""
