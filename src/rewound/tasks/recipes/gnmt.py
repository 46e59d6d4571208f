"""The authors' translation network: GNMT with attention (Wu et al. 2016), as in Google's MLPerf code.

    encoder: embedding | an LSTM in each direction | n - 1 LSTMs
    decoder: embedding | an LSTM with attention | n - 1 LSTMs | projection on the vocabulary

The bottom LSTM of the decoder reads the embedding and the context of the step before; its output asks for the context
of this step, which all LSTMs above read beside what comes from below. The decoder starts from the encoder's last
states: the backward LSTM's, then those of the upper layers. Layers from the third on add their input to their output;
what attention adds to that input is left out. Dropout falls on the input of every LSTM, not on what is added.

With four layers of 1,024 units there are 98,605,057 parameters beside embeddings and projection. An LSTM has one bias:
with the two of `torch.nn.LSTM`, their sum would be trained at twice the learning rate. All weights start uniformly
within 0.1 and all biases at 0, also those of forget gates.
"""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewound.foundations.errors import InputError
from rewound.tasks.recipes.attended import Weights, attended, attention_weights, fused, lstm_cell, wide

NO_WORD = -100
"""What follows the end of a target, and is no part of the loss."""
_SCALE = 0.1  # of the initial weights
_SATURATED = 1e4  # a gate's sigmoid of it is 1, and of its negative 0, whatever else is added
_ALIGNMENT = 8  # how many numbers of 16 bits tensor cores take at once


class Memory(NamedTuple):
    """A sentence to translate, as the decoder attends to it."""

    outputs: Tensor
    """The encoder's, for each position; zero behind the end of a sentence."""
    keys: Tensor
    """What a query is compared with at each position, attention's bias included."""
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
    """A layer over whole sequences, or one step of it: (time, batch, inputs) -> (time, batch, units).

    A sequence is one call of torch's own LSTM, which is cuDNN's on a GPU and knows neither a single bias nor sequences
    that end. Both are inputs here: one is always 1, and its weight is the bias; another is 1 where there is no word,
    and its weights close the input gate and open the forget gate, to exactly 0 and 1, so that the cell stays.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.weight_ih = nn.Parameter(torch.empty(4 * units, inputs))
        self.weight_hh = nn.Parameter(torch.empty(4 * units, units))
        self.bias = nn.Parameter(torch.empty(4 * units))

    def forward(self, inputs: Tensor, is_word: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs at all positions, and the last output and cell; a position without a word changes nothing."""
        start = inputs.new_zeros(inputs.shape[1], self.weight_hh.shape[1])
        outputs, cell = self._run(inputs, ~is_word, start, start)
        outputs = outputs * is_word.unsqueeze(2)
        is_last = is_word & ~F.pad(is_word[1:], (0, 0, 0, 1))
        return outputs, (outputs * is_last.unsqueeze(2)).sum(0), cell

    def outputs_from(self, output: Tensor, cell: Tensor, inputs: Tensor) -> Tensor:
        """The outputs at all positions, from a given output and cell on."""
        return self._run(inputs, inputs.new_zeros(inputs.shape[:2]), output, cell)[0]

    def _run(self, inputs: Tensor, no_word: Tensor, output: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        dtype, units = _working_dtype(inputs), self.weight_hh.shape[1]
        closing = torch.cat([self.bias.new_full((units,), weight) for weight in (-_SATURATED, _SATURATED, 0, 0)])
        with torch.autocast(inputs.device.type, enabled=False), warnings.catch_warnings():
            # torch warns that it copies the weights into one piece at every call, which takes microseconds.
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            more = torch.stack([torch.ones_like(no_word), no_word], 2).to(dtype)
            inputs = torch.cat([inputs.to(dtype), F.pad(more, (0, _ALIGNMENT - 2))], 2)
            columns = F.pad(torch.stack([self.bias, closing], 1), (0, _ALIGNMENT - 2))
            weights = [torch.cat([self.weight_ih.to(dtype), columns.to(dtype)], 1), self.weight_hh.to(dtype)]
            start = output.to(dtype).unsqueeze(0), cell.to(dtype).unsqueeze(0)
            outputs, _, cell = torch.lstm(
                inputs, start, weights, False, 1, 0.0, torch.is_grad_enabled(), False, batch_first=False
            )
        return outputs, cell.squeeze(0)

    def step(self, inputs: Tensor, output: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """One position: (batch, inputs) -> the next output and cell."""
        gates = F.linear(inputs, self.weight_ih, self.bias) + F.linear(output, self.weight_hh)
        return lstm_cell(gates, cell)


class Attention(nn.Module):
    """Bahdanau's attention with a normalised vector: g v/|v| . tanh(query + key + b), softmax over the words."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.query = nn.Linear(units, units, bias=False)
        self.key = nn.Linear(units, units, bias=False)
        self.v = nn.Parameter(torch.empty(units))
        self.b = nn.Parameter(torch.empty(units))
        self.g = nn.Parameter(torch.empty(()))

    @property
    def direction(self) -> Tensor:
        direction: Tensor = self.g * self.v / self.v.norm()
        return direction

    def forward(self, output: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """The context for an output of the bottom LSTM, and how much of each word is in it.

        There may be several outputs for each sentence of the memory, one after another: hypotheses, for example.
        """
        sentences = len(memory.keys)
        query = self.query(output).unflatten(0, (sentences, -1))
        weights = attention_weights(query, memory.keys.unsqueeze(1), self.direction, memory.is_word.unsqueeze(1))
        return (weights.to(memory.outputs.dtype) @ memory.outputs).flatten(0, 1), weights.flatten(0, 1)


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
        bottom, *upper = _lstms(self.decoder)
        x, context = self._attended(bottom, self.target_embedding(target.t()), state, memory)
        for number, layer in enumerate(upper, start=1):
            inputs = self._dropped(torch.cat([x, context], 2))
            above = layer.outputs_from(state.outputs[number], state.cells[number], inputs)
            x = x + above if number > 1 else above
        return self._projected(x.transpose(0, 1).contiguous())

    def _projected(self, x: Tensor) -> Tensor:
        dtype, words = _working_dtype(x), self.projection.out_features
        if dtype.itemsize > 2 or words % _ALIGNMENT == 0:
            scores: Tensor = self.projection(x)
            return scores
        weight = F.pad(self.projection.weight.to(dtype), (0, 0, 0, -words % _ALIGNMENT))
        return F.linear(x.to(dtype), weight)[..., :words]

    def _attended(self, bottom: LSTM, words: Tensor, state: Decoding, memory: Memory) -> tuple[Tensor, Tensor]:
        """The bottom layer's outputs and contexts, which only it reads one step later."""
        dtype, units = _working_dtype(words), words.shape[2]
        # Dropout falls on word and context alike.
        for_words, for_contexts = self._dropped(words.new_ones(*words.shape[:2], 2 * units, dtype=dtype)).chunk(2, 2)
        from_words, from_context = bottom.weight_ih.chunk(2, 1)
        projected = F.linear(words.to(dtype) * for_words, from_words, bottom.bias)
        from_output, query = bottom.weight_hh.to(dtype), self.attention.query.weight.to(dtype)
        with torch.autocast(words.device.type, enabled=False):
            return attended(
                projected,
                (state.outputs[0].to(dtype), wide(state.cells[0])),
                Weights(from_output, from_context.to(dtype), query, wide(self.attention.direction)),
                memory.keys,
                memory.outputs,
                memory.is_word,
                for_contexts.roll(-1, 0),  # by the step that has made the context, not by the one that reads it
            )

    def encoded(self, source: Tensor, lengths: Tensor) -> tuple[Memory, Decoding]:
        """The sentences as the decoder attends to them, and where it starts."""
        is_word = torch.arange(source.shape[1], device=source.device).unsqueeze(1) < lengths
        embedded = self.source_embedding(source.t())
        ahead, _, _ = self.forward_encoder(self._dropped(embedded), is_word)
        # Backwards what is behind the end of a sentence comes first, and leaves the state at zero.
        back, output, cell = self.backward_encoder(self._dropped(embedded).flip(0), is_word.flip(0))
        x, outputs, cells = torch.cat([ahead, back.flip(0)], 2), [output], [cell]
        for number, layer in enumerate(self.encoder):
            above, output, cell = layer(self._dropped(x), is_word)
            x = x + above if number > 0 else above
            outputs.append(output)
            cells.append(cell)
        x = x.transpose(0, 1).contiguous()
        memory = Memory(x, self.attention.key(x) + self.attention.b.to(x.dtype), is_word.t().contiguous())
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
        with torch.autocast(x.device.type, enabled=False):  # hypotheses are told apart by small differences
            scores = F.linear(wide(x), wide(self.projection.weight))
        return scores, Decoding(tuple(outputs), tuple(cells), context), weights

    def _dropped(self, inputs: Tensor) -> Tensor:
        return F.dropout(inputs, self.dropout, self.training)


@fused
def smoothed_loss(scores: Tensor, following: Tensor, smoothing: float) -> Tensor:
    """The sum over words of the cross-entropy with smoothed labels; what follows is `NO_WORD` where nothing counts.

    Compiled, it never has the scores in float32 in memory, which are a gigabyte for 256 sentences of the authors'.
    """
    return F.cross_entropy(
        wide(scores).flatten(0, 1),
        following.flatten(),
        ignore_index=NO_WORD,
        label_smoothing=smoothing,
        reduction="sum",
    )


def _lstms(layers: nn.ModuleList) -> list[LSTM]:
    return [layer for layer in layers if isinstance(layer, LSTM)]


def _working_dtype(tensor: Tensor) -> torch.dtype:
    """What products of the tensor are computed in."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
