"""Two processes with a model that is split over them write one checkpoint per kind of FSDP: `python sharded_run.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from agentcore_rl_toolkit.policy import load_policy
from agentcore_rl_toolkit.weights.checkpoint import write_checkpoint
from agentcore_rl_toolkit.weights.sharded import is_sharded

PROCESSES = 2


def work(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=PROCESSES)
    for kind in ("fsdp1", "fsdp2"):
        model, _ = load_policy()
        assert not is_sharded(model)
        if kind == "fsdp1":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        else:
            mesh = init_device_mesh("cpu", (PROCESSES,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        assert is_sharded(model)
        write_checkpoint(model, folder / kind, write=rank == 0)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Forks have the libraries loaded.
    torch.multiprocessing.start_processes(work, (Path(sys.argv[1]),), PROCESSES, start_method="fork")
