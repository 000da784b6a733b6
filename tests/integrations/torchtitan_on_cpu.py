"""The example's trainer on CPUs, which torchtitan does not support: it asks the device for its name and memory.

python torchtitan_on_cpu.py OUT TWEAK: the configuration of the example, changed by the statements TWEAK.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
from torch import Tensor

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.current_device = lambda: 0  # type: ignore[assignment, return-value]
for name, value in {
    "get_device_name": "cpu",
    "get_device_properties": SimpleNamespace(total_memory=2**34),
    "reset_peak_memory_stats": None,
    "empty_cache": None,
    "memory_stats": defaultdict(int),
}.items():
    setattr(torch.cpu, name, lambda *args, value=value: value)
dist.set_timeout = lambda *args: None  # type: ignore[attr-defined]  # of torch's nightly builds

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402

from tests.integrations import example_scripts  # noqa: E402


class Rows(BaseDataLoader):
    """Random tokens. Row i is the same for each number of data-parallel ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True

    def __init__(self, config: Any, dp_rank: int, dp_world_size: int, seq_len: int, local_batch_size: int, **_: Any):
        self.ranks, self.rank, self.rows, self.length = dp_world_size, dp_rank, local_batch_size, seq_len
        self.next_row = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            seeds = [self.rank + self.ranks * (self.next_row + row) for row in range(self.rows)]
            self.next_row += self.rows
            generators = [torch.Generator().manual_seed(seed) for seed in seeds]
            tokens = torch.stack([torch.randint(2000, (self.length + 1,), generator=seeded) for seeded in generators])
            positions = torch.arange(self.length).repeat(self.rows, 1)
            yield {"input": tokens[:, :-1].contiguous(), "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"next_row": self.next_row}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.next_row = state_dict["next_row"]


class Tokenizer(BaseTokenizer):
    """Data are numbers here."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    decode = get_vocab_size = encode


def main(out: str, tweak: str) -> None:
    config = example_scripts.load("torchtitan_trainer").configuration(out)
    config.tokenizer, config.dataloader, config.validator.dataloader = Tokenizer.Config(), Rows.Config(), Rows.Config()
    config.training.seq_len, config.training.steps, config.training.global_batch_size = 32, 4, 16
    config.training.mixed_precision_param = "float32"
    config.training.local_batch_size = 8
    config.checkpoint.enable, config.checkpoint.interval = True, 3
    config.validator.enable, config.validator.freq = True, 2
    exec(tweak, {"config": config})
    init_logger()
    trainer = config.build()
    if config.checkpoint.create_seed_checkpoint:
        trainer.checkpointer.save(curr_step=0, last_step=True)
    else:
        trainer.train()
    trainer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
