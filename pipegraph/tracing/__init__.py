"""Runs of a pipeline recorded as traces: written, read, merged and analysed. What it finds is presented by `report`."""
