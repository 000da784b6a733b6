"""What a model does outside of its graph: each kind is reproduced or refused, with the line."""
