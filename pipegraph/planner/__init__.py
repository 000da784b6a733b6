"""Floor 4: from split points to a plan."""
