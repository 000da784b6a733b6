"""The joint plan: how a cluster is divided, the schedule, the cuts and what is computed again, chosen together.

layout_costs.py   the prices of a model for a layout and rows of a microbatch; what ranks along tp divide
choices.py        the dimensions of the mesh, candidates, and what was found for them
search.py         which candidate is the best, and a bound for all
"""
