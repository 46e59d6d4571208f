"""The authors' translation network: GNMT with attention (Wu et al. 2016), as in Google's MLPerf code.

    encoder: embedding | an LSTM in each direction | n - 1 LSTMs
    decoder: embedding | an LSTM with attention | n - 1 LSTMs | projection on the vocabulary

The bottom LSTM of the decoder reads the embedding and the context of the step before; its output asks for the context
of this step, which all LSTMs above read beside what comes from below. The decoder starts from the encoder's last
states: the backward LSTM's, then those of the upper layers. Layers from the third on add their input to their output;
what attention adds to that input is left out. Dropout falls on the input of every LSTM, not on what is added.

With four layers of 1,024 units there are 98,605,057 parameters beside embeddings and projection. An LSTM has one bias;
the second one of `torch.nn.LSTM` would double its learning rate. All weights
start uniformly within 0.1 and all biases at 0, also those of forget gates.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewound.foundations.errors import InputError

_SCALE = 0.1  # of the initial weights


class Memory(NamedTuple):
    """A sentence to translate, as the decoder attends to it."""

    outputs: Tensor
    """The encoder's, for each position; zero behind the end of a sentence."""
    keys: Tensor
    """What a query is compared with at each position."""
    is_word: Tensor
    """Whether a position has a word."""


class Decoding(NamedTuple):
    """Where the decoder is in each sentence."""

    outputs: tuple[Tensor, ...]
    """The last output of each LSTM."""
    cells: tuple[Tensor, ...]
    context: Tensor
    """What attention gave in the last step."""


class LSTM(nn.Module):
    """A layer over whole sequences, or one step of it: (batch, time, inputs) -> (batch, time, units)."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.weight_ih = nn.Parameter(torch.empty(4 * units, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * units, units))
        self.bias = nn.Parameter(torch.empty(4 * units))

    def forward(self, inputs: Tensor, is_word: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs at all positions, and the last output and cell; a position without a word changes nothing."""
        output = cell = inputs.new_zeros(len(inputs), self.units)
        projected, outputs = F.linear(inputs, self.weight_ih, self.bias), list[Tensor]()
        for gates, here in zip(projected.unbind(1), is_word.unsqueeze(2).unbind(1), strict=True):
            next_output, next_cell = self._stepped(gates, output, cell)
            outputs.append(next_output * here)
            output, cell = torch.where(here, next_output, output), torch.where(here, next_cell, cell)
        return torch.stack(outputs, 1), output, cell

    def outputs_from(self, output: Tensor, cell: Tensor, inputs: Tensor) -> Tensor:
        """The outputs at all positions, from a given output and cell on."""
        projected, outputs = F.linear(inputs, self.weight_ih, self.bias), list[Tensor]()
        for gates in projected.unbind(1):
            output, cell = self._stepped(gates, output, cell)
            outputs.append(output)
        return torch.stack(outputs, 1)

    def step(self, inputs: Tensor, output: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """One position: the next output and cell."""
        return self._stepped(F.linear(inputs, self.weight_ih, self.bias), output, cell)

    def _stepped(self, projected: Tensor, output: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        into, new, forget, out = (projected + F.linear(output, self.weight_hh)).chunk(4, 1)
        cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
        return out.sigmoid() * cell.tanh(), cell


class Attention(nn.Module):
    """Bahdanau's attention with a normalised vector: g v/|v| . tanh(query + key + b), softmax over the words."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.query = nn.Linear(units, units, bias=False)
        self.key = nn.Linear(units, units, bias=False)
        self.v = nn.Parameter(torch.empty(units))
        self.b = nn.Parameter(torch.empty(units))
        self.g = nn.Parameter(torch.empty(()))

    def forward(self, output: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """The context for an output of the bottom LSTM, and how much of each word is in it."""
        direction = self.g * self.v / self.v.norm()
        scores = torch.tanh(memory.keys + (self.query(output) + self.b).unsqueeze(1)) @ direction
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        weights = scores.masked_fill(~memory.is_word, -torch.inf).softmax(1)
        return (weights.to(memory.outputs.dtype).unsqueeze(1) @ memory.outputs).squeeze(1), weights


class GNMT(nn.Module):
    """Takes words as numbers below `vocabulary`, and gives a score for every word at every position of the target."""

    def __init__(
        self,
        vocabulary: int,
        *,
        layers: int = 4,
        units: int = 1024,
        dropout: float = 0.2,
        shares_embedding: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if layers < 2:
            raise InputError(f"layers must be at least 2, not {layers}: one reads in both directions, one above it")
        self.dropout = dropout
        self.target_embedding = nn.Embedding(vocabulary, units)
        self.source_embedding = self.target_embedding if shares_embedding else nn.Embedding(vocabulary, units)
        self.forward_encoder, self.backward_encoder = LSTM(units, units), LSTM(units, units)
        self.encoder = nn.ModuleList(LSTM(2 * units if i == 0 else units, units) for i in range(layers - 1))
        self.attention = Attention(units)
        self.decoder = nn.ModuleList(LSTM(2 * units, units) for _ in range(layers))
        self.projection = nn.Linear(units, vocabulary, bias=False)
        self._begin(generator)

    @torch.no_grad()
    def _begin(self, generator: torch.Generator | None) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or name == "attention.b":
                parameter.zero_()
            elif name == "attention.g":
                parameter.fill_(self.attention.v.numel() ** -0.5)
            else:
                parameter.uniform_(-_SCALE, _SCALE, generator=generator)

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        """Scores of the next word at each position of `target`, which begins with the word that begins a sentence.

        What a source has behind its length is ignored. A target needs no length: nothing depends on what follows.
        """
        memory, state = self.encoded(source, lengths)
        embedded = self.target_embedding(target)
        # The bottom layer is a loop over time: its attention is the next step's input. The others take it as it is.
        bottom, *upper = _lstms(self.decoder)
        output, cell, context = state.outputs[0], state.cells[0], state.context
        outputs, contexts = list[Tensor](), list[Tensor]()
        for words in embedded.unbind(1):
            output, cell = bottom.step(self._dropped(torch.cat([words, context], 1)), output, cell)
            context, _ = self.attention(output, memory)
            outputs.append(output)
            contexts.append(context)
        x, context = torch.stack(outputs, 1), torch.stack(contexts, 1)
        for number, layer in enumerate(upper, start=1):
            inputs = self._dropped(torch.cat([x, context], 2))
            above = layer.outputs_from(state.outputs[number], state.cells[number], inputs)
            x = x + above if number > 1 else above
        scores: Tensor = self.projection(x)
        return scores

    def encoded(self, source: Tensor, lengths: Tensor) -> tuple[Memory, Decoding]:
        """The sentences as the decoder attends to them, and where it starts."""
        is_word = _is_word(source, lengths)
        embedded = self.source_embedding(source)
        ahead, _, _ = self.forward_encoder(self._dropped(embedded), is_word)
        # Backwards what is behind the end of a sentence comes first, and leaves the state at zero.
        back, output, cell = self.backward_encoder(self._dropped(embedded).flip(1), is_word.flip(1))
        x, outputs, cells = torch.cat([ahead, back.flip(1)], 2), [output], [cell]
        for number, layer in enumerate(self.encoder):
            above, output, cell = layer(self._dropped(x), is_word)
            x = x + above if number > 0 else above
            outputs.append(output)
            cells.append(cell)
        x = x * is_word.unsqueeze(2)
        memory = Memory(x, self.attention.key(x), is_word)
        return memory, Decoding(tuple(outputs), tuple(cells), torch.zeros_like(output))

    def step(self, words: Tensor, state: Decoding, memory: Memory) -> tuple[Tensor, Decoding, Tensor]:
        """Scores of the word that follows `words`, where the decoder is then, and what it attended to."""
        bottom, *upper = _lstms(self.decoder)
        inputs = torch.cat([self.target_embedding(words), state.context], 1)
        x, cell = bottom.step(self._dropped(inputs), state.outputs[0], state.cells[0])
        context, weights = self.attention(x, memory)
        outputs, cells = [x], [cell]
        for number, layer in enumerate(upper, start=1):
            inputs = self._dropped(torch.cat([x, context], 1))
            output, cell = layer.step(inputs, state.outputs[number], state.cells[number])
            x = x + output if number > 1 else output
            outputs.append(output)
            cells.append(cell)
        return self.projection(x), Decoding(tuple(outputs), tuple(cells), context), weights

    def _dropped(self, inputs: Tensor) -> Tensor:
        return F.dropout(inputs, self.dropout, self.training)


def _lstms(layers: nn.ModuleList) -> list[LSTM]:
    return [layer for layer in layers if isinstance(layer, LSTM)]


def _is_word(words: Tensor, lengths: Tensor) -> Tensor:
    return torch.arange(words.shape[1], device=words.device) < lengths.unsqueeze(1)
