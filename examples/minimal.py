"""Ring attention in ten lines: torchrun --nproc-per-node=4 examples/minimal.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ringattn_ext as ra

dist.init_process_group("gloo")
torch.manual_seed(0)  # every rank makes the same whole tensors, [B, H, S, D]
query, key, value = (torch.randn(1, 8, 4096, 64) for _ in range(3))

shards = [ra.shard(x, dim=2) for x in (query, key, value)]  # this rank's 1024 tokens of each
out = ra.unshard(ra.ring_attention(*shards, is_causal=True), dim=2)

if dist.get_rank() == 0:
    dense = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    print(f"largest difference from dense attention: {(out - dense).abs().max():.1e}")
dist.destroy_process_group()
