"""Running a package under a schedule.

Pipeline ─ BatchSplitter ─▶ StepInputs ─▶ Executor, one per rank ─▶ StepOutputs
   │                                          ├─ kernels: F, I, W and B of each stage
   │                                          └─ transport: local (one process) or distributed (gloo, NCCL)
   └─ processes: joining, launching, faults; parameters, ties, gradient clipping; observers
"""
