"""The optimizer of `solve`.

solve ─▶ cut_search ─▶ branch_and_bound ─▶ local_search ─▶ objectives ─▶ prefix_sums

objectives  makespan.py, objective.py and memory_need.py: what cuts cost, as the makespan of a schedule, the slowest
            stage, the memory of ranks. Each is the largest of many linear bounds
search      which cuts are the best: local search finds good ones; branch and bound, by relaxations of sets of cuts,
            proves how good they are
options     option_search.py chooses what each stage computes again as well; it has a bound by linear programming, for
            which linear_program.py calls HiGHS
"""
