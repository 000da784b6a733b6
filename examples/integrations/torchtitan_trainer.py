"""torchtitan's trainer and its debug model of Llama 3, in a pipeline of pipegraph. In a checkout of torchtitan:

torchrun --nproc-per-node 2 torchtitan_trainer.py OUT; with 4, there are two data-parallel ranks.
"""

import os
import sys
from dataclasses import replace
from functools import partial

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from pipegraph.integrations.torchtitan import pipelining_fn

RANKS = int(os.environ.get("WORLD_SIZE", "1"))


def configuration(out: str) -> Trainer.Config:
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # masks of flex attention are no tensors
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    config.dump_folder = out
    config.training.disable_cuda_graphs = True
    if RANKS > 1:
        config.model_spec = replace(config.model_spec, pipelining_fn=partial(pipelining_fn, recompute="min-cut"))
        config.parallelism.pipeline_parallel_degree = 2
        config.parallelism.data_parallel_shard_degree = RANKS // 2
        config.parallelism.pipeline_parallel_schedule = "ZBVZeroBubble"
        config.parallelism.pipeline_parallel_microbatch_size = 2
    return config


if __name__ == "__main__":
    init_logger()
    trainer = configuration(sys.argv[1]).build()
    trainer.train()
    trainer.close()
