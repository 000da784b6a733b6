"""What a model does beside the operations of its graph: each kind is reproduced or refused, with the line."""
