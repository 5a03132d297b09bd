"""One block holds bf16, fp32 and float64 parameters.

Source: https://github.com/huggingface/trl/issues/1723
    https://github.com/axolotl-ai-cloud/axolotl/issues/1494
Situation: One block holds bf16 linears, fp32 norms and a float64 scale; flat buffers require one dtype and either
    refuse or cast parameters.
Required: Each parameter keeps its dtype through wrap, step, state_dict; result equals plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class MixedBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln, self.f1, self.f2 = nn.LayerNorm(d), nn.Linear(d, 2 * d).bfloat16(), nn.Linear(2 * d, d).bfloat16()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.f2(F.gelu(self.f1(self.ln(x).bfloat16())))
        return x + (h.double() * self.scale).float()


def build() -> Case:
    model = nn.Sequential(MixedBlock(8), MixedBlock(8), nn.Linear(8, 2))
    x, y = torch.randn(6, 8), torch.arange(6) % 2

    def dtypes(model: nn.Module) -> list[str]:
        scales = [str(v.dtype) for k, v in model.state_dict().items() if k.endswith("scale")]
        return sorted({str(p.dtype) for p in model.parameters()}) + scales

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=dtypes,
        expect=["torch.bfloat16", "torch.float32", "torch.float64", "torch.float64", "torch.float64"],
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
