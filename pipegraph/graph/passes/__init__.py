"""Passes over a captured graph, one kind a file: one changes it in place; ``pass_order.PASSES`` lists them."""
