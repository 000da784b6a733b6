"""Training runs whose ranks are killed at random moments: each has to end as the run that nobody killed."""
