"""A speech model from transformers that masks its features by numpy's generator.

Situation: A tiny random Wav2Vec2 with CTC: SpecAugment masks are drawn by numpy in the training forward, layer drop
    by torch, weight-normalised positional convolutions by a parametrisation.
Required: As plain, numpy's next draw included.
"""

import torch
from torch import Tensor

from .harness import Case


def build() -> Case:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=12,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(4, 2),
        conv_kernel=(6, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.4,
        mask_time_length=2,
        layerdrop=0.3,
        hidden_dropout=0.1,
        feat_proj_dropout=0.1,
    )
    model, audio = Wav2Vec2ForCTC(config).train(), torch.randn(2, 200)
    labels = torch.tensor([[3, 4, 5], [6, 7, -100]])

    def step(model: Wav2Vec2ForCTC, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        out = model(audio, labels=labels, output_hidden_states=True)
        loss = out.loss + 0.01 * out.hidden_states[-1].square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((audio,), {"labels": labels}),
        loss=lambda o: o.loss,
        step=step,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
