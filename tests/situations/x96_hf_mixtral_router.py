"""A mixture-of-experts causal LM from transformers with its router loss, sdpa attention and a sliding window.

Situation: Tiny random Mixtral config; the router's choice depends on values, the auxiliary loss is part of the
    output, padding on the left, attention dropout, a second forward in eval with a cache between steps.
Required: As plain.
"""

import torch
from torch import Tensor

from .harness import Case


def build() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=32,
        sliding_window=4,
        attention_dropout=0.1,
        output_router_logits=True,
        router_jitter_noise=0.05,
    )
    model, ids, log = MixtralForCausalLM(config).train(), torch.randint(3, 40, (2, 8)), []
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, :3] = 0

    def step(model: MixtralForCausalLM, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
        model.eval()
        with torch.no_grad():
            log.append(model(input_ids=ids[:, :4], use_cache=True).logits.argmax(-1).tolist())
        model.train()
        loss = out.loss + 0.1 * out.aux_loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((), {"input_ids": ids, "labels": ids}),
        loss=lambda o: o.loss,
        step=step,
        extra=lambda m: log,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
