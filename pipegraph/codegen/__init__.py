"""Floor 5: a plan becomes a package of Python source and weights."""
