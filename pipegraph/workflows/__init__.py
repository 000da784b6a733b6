"""The verbs of the command line as functions: train, verify, recalibrate, profile."""
