"""Running a package under a schedule.

Pipeline ─ StepRunner ─ BatchSplitter ─▶ StepInputs ─▶ Executor, one per rank ─▶ StepOutputs
   │                                                      ├─ kernels: F, I, W and B of each stage
   │                                                      ├─ collectives: parameters gathered, gradients reduced
   │                                                      └─ transport: in one process, or distributed (gloo, NCCL)
   └─ processes: joining, launching, faults; parameters, ties, gradients over all ranks; observers (measurements)
"""
