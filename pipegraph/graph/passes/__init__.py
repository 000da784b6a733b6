"""Passes over a captured graph. Each changes the graph in place; `pipegraph.graph.capture` lists them in order."""
