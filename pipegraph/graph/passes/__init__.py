"""Passes over a captured graph, one kind a file: a pass changes the graph in place; ``capture.PASSES`` lists them."""
