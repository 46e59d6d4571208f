"""The translation network as a loop over words that autograd differentiates: what the fast one must equal."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from rewound.tasks.recipes.gnmt import GNMT, LSTM

Dropped = Callable[[Tensor], Tensor]
"""What dropout leaves of the inputs of a layer, (time, batch, inputs)."""


def plain_scores(model: GNMT, source: Tensor, lengths: Tensor, target: Tensor, dropped: Dropped) -> Tensor:
    """The scores of `model(source, lengths, target)`."""
    is_word = torch.arange(source.shape[1]).unsqueeze(1) < lengths
    embedded = model.source_embedding(source.t())
    ahead, _, _ = masked(model.forward_encoder, dropped(embedded), is_word)
    back, h, c = masked(model.backward_encoder, dropped(embedded).flip(0), is_word.flip(0))
    x, states = torch.cat([ahead, back.flip(0)], 2), [(h, c)]
    for number, layer in enumerate(model.encoder):
        above, h, c = masked(layer, dropped(x), is_word)  # type: ignore[arg-type]
        x = x + above if number else above
        states.append((h, c))
    words, attention = model.target_embedding(target.t()), model.attention
    mask = dropped(torch.ones(*words.shape[:2], 2 * words.shape[2], dtype=words.dtype))
    context, outputs, contexts = torch.zeros_like(h), [], []
    for word, factor in zip(words, mask, strict=True):
        h, c = states[0] = stepped(model.decoder[0], torch.cat([word, context], 1) * factor, *states[0])  # type: ignore[arg-type]
        energies = torch.tanh(attention.key(x) + attention.query(h) + attention.b) @ attention.direction
        shares = energies.masked_fill(~is_word, -torch.inf).softmax(0)
        context = (shares.unsqueeze(2) * x).sum(0)
        outputs.append(h)
        contexts.append(context)
    x = torch.stack(outputs)
    for number, layer in enumerate(model.decoder):
        if number > 0:
            inputs, above, state = dropped(torch.cat([x, torch.stack(contexts)], 2)), [], states[number]
            for here in inputs:
                state = stepped(layer, here, *state)  # type: ignore[arg-type]
                above.append(state[0])
            x = x + torch.stack(above) if number > 1 else torch.stack(above)
    return model.projection(x).transpose(0, 1)  # type: ignore[no-any-return]


def masked(layer: LSTM, inputs: Tensor, is_word: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = c = inputs.new_zeros(inputs.shape[1], layer.weight_hh.shape[1])
    outputs = []
    for x, here in zip(inputs, is_word.unsqueeze(2), strict=True):
        next_h, next_c = stepped(layer, x, h, c)
        outputs.append(next_h * here)
        h, c = torch.where(here, next_h, h), torch.where(here, next_c, c)
    return torch.stack(outputs), h, c


def stepped(layer: LSTM, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (F.linear(x, layer.weight_ih, layer.bias) + F.linear(h, layer.weight_hh)).chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c
