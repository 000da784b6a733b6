"""Running a package under a schedule.

Pipeline ─ microbatch ─▶ Feed ─▶ drive ─▶ Executor (one per rank) ─▶ kernels, Transport ─▶ Results
   │                                                    (local: one process | distributed: gloo, NCCL)
   └─ choose (the schedule), world (the processes), parameters, ties, clip, faults (around everything)
"""
