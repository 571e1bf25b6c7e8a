"""The proof of exactness: loss and gradients of the ring against dense attention on the whole sequence.

Both sides use the same weights, the same window and the same model class. The dense side runs in one process of its own
with torch's scaled_dot_product_attention and never touches the ring. It makes a whole training step, so that its peak
memory covers what a rank's does.

The tolerances: in fp32, sums taken in another order leave losses some 1e-7 apart and gradients 1e-7 ... 1e-6 of their
norm. On 8,192 tokens, measured on the parameter that shows it most, one wrong label makes 5e-3, one 64 x 64 tile of
scores left out 1e-3, the key gradients of 64 tokens lost 2e-2. The limits stand between the two, with room for other
machines. (A single wrong pair of a query and a key would drown in rounding here; the tests of the attention itself look
for that.)
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import build_model, share_of_loss
from .processes import PeakMemory
from .text import tokens_and_labels
from .training import Job, build_optimizer

LOSS_TOLERANCE = 1e-5  # relative
GRADIENT_TOLERANCE = 1e-4  # norm of the difference over norm of the dense gradient, per parameter


def dense_run(rank: int, job: Job) -> None:
    """One process, the whole sequence. Reads the weights and the window from ring.pt, writes dense.pt."""
    ring = torch.load(job.folder / "ring.pt")
    positions = torch.arange(job.seq_len)
    attention = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    model = build_model(job.seed)
    model.load_state_dict(ring["weights"])
    optimizer = build_optimizer(model)
    memory = PeakMemory()
    tokens, labels = tokens_and_labels(job.text, ring["offset"], job.seq_len, positions)
    loss = share_of_loss(model(tokens, positions, attention), labels, job.seq_len)
    loss.backward()
    optimizer.step()  # leaves the gradients as they are
    result = {
        "memory": [memory.resting, memory.peak()],
        "loss": loss.item(),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
    }
    torch.save(result, job.folder / "dense.pt")


@dataclass(frozen=True)
class Comparison:
    """Relative differences between the ring and the dense run."""

    loss: float
    all_gradients: float
    worst_gradient: float
    worst_parameter: str

    @property
    def exact(self) -> bool:
        # A NaN compares false with everything, so it fails here.
        gradients_agree = self.all_gradients <= GRADIENT_TOLERANCE and self.worst_gradient <= GRADIENT_TOLERANCE
        return self.loss <= LOSS_TOLERANCE and gradients_agree


def compare(ring: dict[str, Any], dense: dict[str, Any]) -> Comparison:
    """Both sides hold "loss" and "gradients" (name -> tensor)."""
    if ring["gradients"].keys() != dense["gradients"].keys():
        raise ValueError("the two runs have gradients for different parameters")
    pairs = {name: (ring["gradients"][name], gradient) for name, gradient in dense["gradients"].items()}
    differences = {name: relative_difference(ours, theirs) for name, (ours, theirs) in pairs.items()}
    ours, theirs = (torch.cat([pair[side].flatten() for pair in pairs.values()]) for side in (0, 1))
    worst = max(differences, key=lambda name: (differences[name] != differences[name], differences[name]))  # NaN first
    loss = relative_difference(torch.tensor(ring["loss"]), torch.tensor(dense["loss"]))
    return Comparison(loss, relative_difference(ours, theirs), differences[worst], worst)


def relative_difference(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference over norm of the reference; 0 where both are zero."""
    value, reference = value.double(), reference.double()
    difference = (value - reference).norm().item()
    return difference if difference == 0 else difference / max(reference.norm().item(), 1e-300)
