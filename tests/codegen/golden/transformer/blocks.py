"""The blocks that the stages of Transformer (transformer.py) share."""
