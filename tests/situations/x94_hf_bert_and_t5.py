"""Encoder and encoder-decoder from transformers: BERT and T5, with padding masks and tied heads.

Situation: Tiny random configs in one wrapped module; BERT's pooled states are fed to T5 as input embeddings; dropout
    in both; T5 shares one embedding among encoder, decoder and head; label padding is ignored.
Required: As plain; the ties hold.
"""

import torch
from torch import Tensor, nn

from .harness import Case


class BertThenT5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

        bert = BertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
        t5 = T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
        self.bert, self.t5 = BertModel(bert), T5ForConditionalGeneration(t5)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        states = self.bert(input_ids=ids, attention_mask=mask, output_hidden_states=True)
        embeddings = states.last_hidden_state + states.pooler_output[:, None] + states.hidden_states[0]
        out = self.t5(inputs_embeds=embeddings, attention_mask=mask, labels=labels, use_cache=False)
        return out.loss + 0.01 * out.encoder_last_hidden_state.square().mean()


def build() -> Case:
    ids, mask = torch.randint(1, 40, (2, 6)), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    labels = torch.randint(1, 40, (2, 4)).masked_fill(torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1]]).bool(), -100)
    return Case(
        model=BertThenT5().train(),
        batch=((ids, mask, labels), {}),
        loss=lambda o: o,
        extra=lambda m: [
            m.t5.encoder.embed_tokens.weight is m.t5.shared.weight,
            m.t5.decoder.embed_tokens.weight is m.t5.shared.weight,
        ],
        expect=[True, True],
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
