"""Every private interface of torch that pipegraph uses, one file for each part of torch.

Each is wrapped in a function that says why there is no public one. `docs/architecture.md` lists them with the versions
of torch in which they were tried. This package imports nothing of pipegraph above it.
"""
