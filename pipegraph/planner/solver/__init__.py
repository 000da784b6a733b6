"""What `solve` is made of.

Sums ──▶ Space of cuts ──▶ search ──▶ Pool of the best
                             │          ▲ values, and linear figures that are nowhere above them
                             │        Objective: Makespan (Network of a schedule), SlowestStage, Memory
                             ├─ climb, wander: from cuts to better ones nearby
                             └─ Tree: branch and bound, by relaxations (a Game of cuts and linear figures)
"""
