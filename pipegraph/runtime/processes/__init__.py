"""The processes that share a pipeline: starting and connecting them, and ending together when one fails."""
