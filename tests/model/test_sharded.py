"""FSDP2: parameters sharded over two processes train like one."""

import os
import subprocess
import sys

import pytest

WORKER = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from seqmix.model import SeqmixConfig, SeqmixForCausalLM

torch.set_num_threads(1)
torch.manual_seed(0)
config = SeqmixConfig(mixers=["path_fox", "palimpsa_m", "palimpsa_d", "lattice", "attention"],
                      num_hidden_layers=5, hidden_size=32, num_heads=2, vocab_size=31)
model = SeqmixForCausalLM(config).train()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
ids = torch.randint(31, (4, 12), generator=torch.Generator().manual_seed(1))
ids = ids.view(world, -1, 12)[rank]
for _ in range(5):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach() / world
    if world > 1:
        dist.all_reduce(mean)
    if rank == 0:
        print(float(mean))
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
"""


def losses(*launcher: str, script: str) -> list[float]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*launcher, script], capture_output=True, text=True, env=environment, timeout=240
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return [float(line) for line in run.stdout.split()]


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    one = losses(sys.executable, script=str(script))
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    two = losses(*launch, script=str(script))
    assert two == pytest.approx(one, rel=1e-4)
    assert one[-1] < one[0]
