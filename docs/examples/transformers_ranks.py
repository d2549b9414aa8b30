"""A transformers model over two processes: torchrun --standalone --nproc-per-node 2 transformers_ranks.py"""

import asyncio
import os
from datetime import timedelta
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir

import torch
from torch import distributed
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from asynchicache import CacheConfig, ModelSpec, PrefixCachedModel, RankGroup
from asynchicache.integrations.transformers.follower import run_follower

TOKEN = "a secret of this group"
FOLDER = Path(gettempdir(), f"transformers-ranks-{os.getppid()}")  # of this launch
ADDRESS = f"unix:{FOLDER / 'group'}"
CONFIG = CacheConfig(device_slots={"kv": 64}, host_slots={"kv": 64})


def save_model() -> None:
    """A tiny model with random weights stands for yours."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(FOLDER)


async def lead(model: PreTrainedModel, spec: ModelSpec, ranks: int) -> None:
    async with (
        RankGroup.listen(ADDRESS, TOKEN, ranks=ranks) as group,
        PrefixCachedModel.open(model, config=CONFIG, spec=spec, group=group) as served,
    ):
        history = list(range(40))
        for question in ([50, 51, 52], [60, 61, 62]):
            history += question
            answer = served.generate(history, max_new_tokens=20, stop_token_ids=())
            output = [token async for token in answer]
            print(f"{answer.cached_tokens} of {len(history)} tokens were cached")
            history += output


def main() -> None:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    if rank == 0:
        FOLDER.mkdir(mode=0o700)
        save_model()
    distributed.barrier()
    divided = DistributedConfig(tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(FOLDER, distributed_config=divided).eval()
    spec = ModelSpec.from_config(model.config, page_size=16, dtype="float32").shard(tp=(rank, ranks))
    if rank == 0:
        asyncio.run(lead(model, spec, ranks))
        rmtree(FOLDER)
    else:
        asyncio.run(run_follower(model, spec, ADDRESS, TOKEN, rank=rank, config=CONFIG))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
