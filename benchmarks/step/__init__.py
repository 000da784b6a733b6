"""One training step on two cores: pipegraph compared with torch.distributed.pipelining and with a limit.

python -m benchmarks.step

`model` is the model and the batch; `contenders` are the ways to run a step; `cuts` finds where to cut; `rank` is what
each of the two processes does; `account` says where the time of pipegraph's own steps goes.
"""
