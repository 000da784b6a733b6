"""The stages of Transformer (transformer.py) share no blocks."""
