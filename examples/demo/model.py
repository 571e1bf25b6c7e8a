"""A small byte-level causal transformer that does not know whether its sequence is cut over ranks.

All it takes from outside is the global position of each of its tokens (for RoPE) and the attention function: ring
attention for a rank's share, dense attention for the whole sequence. Everything else acts on each token alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ringattn_ext as ra

# query [B, Hq, S, D], key and value [B, Hkv, S, D] -> [B, Hq, S, D], causal
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ModelConfig:
    vocabulary: int = 256
    layers: int = 2
    width: int = 128
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.head_dim = config.width, config.head_dim
        self.attention_norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, config.query_heads * config.head_dim, bias=False)
        self.key = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.attention_out = nn.Linear(config.query_heads * config.head_dim, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def heads(self, projected: Tensor) -> Tensor:
        """[B, S, H * D] -> [B, H, S, D], a view."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        normed = self.attention_norm(x)
        query = ra.rotary(self.heads(self.query(normed)), positions)
        key = ra.rotary(self.heads(self.key(normed)), positions)
        attended = attention(query, key, self.heads(self.value(normed)))
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class ByteTransformer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """tokens int64 [B, S] at global positions int64 [S] -> logits [B, S, vocabulary]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, attention)
        return self.head(self.norm(x))


def share_of_loss(logits: Tensor, labels: Tensor, seq_len: int) -> Tensor:
    """These tokens' share of the mean loss over the whole sequence: the shares of all ranks add up to it."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / seq_len


def build_model(seed: int) -> ByteTransformer:
    torch.manual_seed(seed)
    return ByteTransformer(ModelConfig())
