"""Torch's nested containers."""

from __future__ import annotations

from torch.utils import _pytree as pytree

__all__ = ["pytree", "tree_flatten", "tree_leaves", "tree_unflatten"]

tree_flatten, tree_unflatten, tree_leaves = pytree.tree_flatten, pytree.tree_unflatten, pytree.tree_leaves
"""Structures of lists, tuples, dicts and registered classes, as torch.export knows them. They have no public name."""
