"""An extension for runs in float64: Llama's norms compute in the precision of the model.

transformers computes them in float32, in a float64 model, too. Then a difference in the last bit of
a number, which another number of ranks makes, sometimes decides to which float32 number it is
rounded, and 1e-16 becomes 1e-8.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm


def forward(self: LlamaRMSNorm, hidden_states: Tensor) -> Tensor:
    return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


LlamaRMSNorm.forward = forward
