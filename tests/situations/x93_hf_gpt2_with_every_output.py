"""A transformers GPT-2 with its dropouts, hidden states, attentions and the cache returned in training.

Situation: A tiny random config, labels given, all outputs asked for and used in the loss, use_cache left on (so the
    outputs hold a cache object with gradients), its own gradient checkpointing switched on for one step.
Required: As plain.
"""

import torch
from torch import Tensor

from .harness import Case


def build() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=2, n_head=2, attn_implementation="eager")
    model, ids, kinds = GPT2LMHeadModel(config).train(), torch.randint(0, 40, (2, 7)), []

    def step(model: GPT2LMHeadModel, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        if i == 2:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        out = model(input_ids=ids, labels=ids, use_cache=i != 2, output_hidden_states=True, output_attentions=True)
        kinds.append([type(out).__name__, type(out.past_key_values).__name__, len(out.hidden_states)])
        loss = out.loss + 0.01 * out.hidden_states[1].square().mean() + out.attentions[0].amax(-1).mean()
        loss.backward()
        optimizer.step()
        if i == 2:
            model.gradient_checkpointing_disable()
        return loss.detach()

    return Case(
        model=model,
        batch=((), {"input_ids": ids, "labels": ids}),
        loss=lambda o: o.loss,
        step=step,
        steps=4,
        extra=lambda m: kinds,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
