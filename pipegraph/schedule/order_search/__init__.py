"""The search for orders that are better than the published ones for given times and memory.

named schedules, greedy orders ──▶ the best of them ──▶ hill climbing on orders of F and I ──▶ hill climbing on all

If few stages of a rank may be whole at a time, orders in which a rank stays longer with a stage are tried as well.
"""
