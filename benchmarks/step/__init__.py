"""One training step on two cores: this project against torch.distributed.pipelining and against what the cores can do.

python -m benchmarks.step

What stands where: `model` is the model and the batch; `contenders` are the ways to run a step; `cuts` finds where to
cut; `rank` is what each of the two processes does; `account` says where our own time goes.
"""
