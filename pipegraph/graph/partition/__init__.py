"""Where a captured graph can be cut, where it is cut, and what crosses the cuts."""
