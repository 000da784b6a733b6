"""Floor 3: what a piece of the graph costs."""
