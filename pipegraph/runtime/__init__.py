"""Running a package under a schedule.

Pipeline ─ StepRunner ─ StepBatch ─ agreement ─ cut ─▶ StepInputs ─▶ Executor, one per rank ─▶ StepOutputs
   │                                                              ├─ kernels: F, I, W and B of each stage
   │                                                              ├─ collectives: parameters, gradients
   │                                                              └─ transport: in one process, or distributed
   └─ processes: joining, launching, faults; parameters, ties, gradients over all ranks; observers (measurements)
"""
