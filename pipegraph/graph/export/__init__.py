"""``torch.export`` on a model with fake parameters, and its program as one flat graph."""
