"""Adversarial training of two sub-models with two optimizers.

Source: https://github.com/deepspeedai/DeepSpeed/issues/399
    https://github.com/Lightning-AI/pytorch-lightning/issues/19773
Situation: Adversarial training: two sub-models, two optimizers, detached and non-detached passes through the
    discriminator, D frozen while G trains.
Required: Same trajectory as plain; backward of one loss must not touch the other optimizer's state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.ModuleDict(
        {
            "G": nn.Sequential(nn.Linear(4, 8), Block(8), nn.Linear(8, 6)),
            "D": nn.Sequential(nn.Linear(6, 8), Block(8), nn.Linear(8, 1)),
        }
    )
    z, real = torch.randn(5, 4), torch.randn(5, 6)
    optimizers: dict[str, torch.optim.Optimizer] = {}  # made in the first step
    bce = F.binary_cross_entropy_with_logits

    def step(model: nn.ModuleDict, _: None, i: int) -> Tensor:
        generator, discriminator = model["G"], model["D"]
        if not optimizers:
            optimizers["g"] = torch.optim.Adam(generator.parameters(), lr=1e-2)
            optimizers["d"] = torch.optim.Adam(discriminator.parameters(), lr=1e-2)
        fake = generator(z)
        optimizers["d"].zero_grad()
        loss_d = bce(discriminator(real), torch.ones(5, 1)) + bce(discriminator(fake.detach()), torch.zeros(5, 1))
        loss_d.backward()
        optimizers["d"].step()
        discriminator.requires_grad_(False)
        optimizers["g"].zero_grad()
        loss_g = bce(discriminator(fake), torch.ones(5, 1))
        loss_g.backward()
        optimizers["g"].step()
        discriminator.requires_grad_(True)
        return loss_d.detach() + loss_g.detach()

    return Case(model=model, batch=((), {}), loss=None, step=step, optimizer=None)
