"""A recorded run's folder, read as far as it can be."""
