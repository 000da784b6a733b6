"""One file a schedule: the order in which each rank runs its actions."""
