"""The optimizer of `solve`.

solve ─▶ cut_search ─▶ local_search ─▶ objectives ─▶ prefix_sums

candidates  the cuts and, if stages have several options to choose from (what each computes again), the option of each
            stage; cut_space.py has sets of them
objectives  makespan.py, objective.py and memory_need.py: what candidates cost, as the makespan of a schedule, the
            slowest stage, the memory of ranks. Each is the largest of many linear bounds
search      which candidates are the best: local search finds good ones; branch and bound, by relaxations of sets of
            candidates, proves how good they are; with several options, so does linear programming over stages of parts
            of segments. linear_program.py calls HiGHS for both
"""
