"""How tensors get from one stage to another: handed over in one process, sent between several."""
