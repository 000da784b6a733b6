"""Floor 2: a model becomes a graph, its segments and the values between them."""
