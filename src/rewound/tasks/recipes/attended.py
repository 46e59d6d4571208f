"""An LSTM that attends at every word and reads what it found with the next one: the one loop over time in GNMT.

For step t, with the input's part of the gates p_t and what dropout multiplies a context by, r_t:

    gates_t   = p_t + W_h h_{t-1} + W_c (r_t * context_{t-1})        i, f, g, o, in torch's order
    c_t, h_t  = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g), sigmoid(o) tanh(c_t)
    score_ts  = v . tanh(key_s + W_q h_t)                            for every word s of the source
    context_t = sum_s softmax_s(score_t) memory_s

`attended` is this as one function with its own derivative. Only what a step hands to the one before it is computed in
the backward loop; whatever is a sum over time is one product afterwards. tanh(key + query) is computed anew there: to
keep it for a batch of 256 sentences of 32 words and 1,024 units would take a gigabyte.

Products are in the type of the tensors given, cells and softmax in float32 at least. On CUDA what lies between two
products is compiled. Nothing waits for the device, so that the loop can be captured in a CUDA graph.
"""

import math
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def fused(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """A function of tensors, compiled when it is first given some on a GPU: few kernels instead of many."""
    compiled = cache(lambda: torch.compile(function))  # not before it is needed: torch then imports its compiler

    @wraps(function)
    def either(*tensors: _Given.args, **others: _Given.kwargs) -> _Result:
        on_gpu = isinstance(tensors[0], Tensor) and tensors[0].is_cuda
        return (compiled() if on_gpu else function)(*tensors, **others)

    return either


class Weights(NamedTuple):
    """What `attended` multiplies by, all (outputs, inputs)."""

    output: Tensor
    """From the last output to the gates."""
    context: Tensor
    """From the last context to the gates."""
    query: Tensor
    direction: Tensor
    """What a word's score is measured along, in float32 at least."""


def attended(
    projected: Tensor,
    state: tuple[Tensor, Tensor],
    weights: Weights,
    keys: Tensor,
    memory: Tensor,
    is_word: Tensor,
    factors: Tensor,
) -> tuple[Tensor, Tensor]:
    """The outputs and the contexts of all steps, (time, batch, units), from an output and a cell on.

    `projected` is the input's part of the gates, (time, batch, 4 units); `keys` and `memory` are (batch, words, units).
    The first step reads no context. `factors` is what dropout multiplies each context by where the next step reads it.
    """
    given = (projected, *state, *weights, keys, memory, is_word, factors)
    outputs, contexts = _Attended.apply(*given)  # type: ignore[no-untyped-call]
    return outputs, contexts


class _Attended(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        output: Tensor,
        cell: Tensor,
        weight_output: Tensor,
        weight_context: Tensor,
        weight_query: Tensor,
        direction: Tensor,
        keys: Tensor,
        memory: Tensor,
        is_word: Tensor,
        factors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        cell = cell.detach()  # like all later ones: one compilation serves them
        from_output, size = torch.cat([weight_output, weight_query]).t(), len(weight_output)
        read, dropped = output @ from_output, torch.zeros_like(output)
        outputs, cells, inputs = [output], [cell], [dropped]
        gates, queries, attentions, contexts = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
        for here, factor in zip(projected.unbind(), factors.unbind(), strict=True):
            gate, output, cell = _stepped(here, read[:, :size], dropped @ weight_context.t(), cell)
            read = output @ from_output  # for the query of this step, and for the gates of the next
            attention, context, dropped = _context(read[:, size:], keys, direction, memory, is_word, factor)
            for kind, new in zip(
                (outputs, cells, inputs, gates, queries, attentions, contexts),
                (output, cell, dropped, gate, read[:, size:], attention, context),
                strict=True,
            ):
                kind.append(new)
        saved = (torch.stack(tensors) for tensors in (outputs, cells, inputs, gates, queries, attentions))
        ctx.save_for_backward(weight_output, weight_context, weight_query, direction, keys, memory, factors, *saved)
        return torch.stack(outputs[1:]), torch.stack(contexts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_contexts: Tensor) -> tuple[Tensor | None, ...]:
        weight_output, weight_context, weight_query, direction, keys, memory, factors, *saved = ctx.saved_tensors
        outputs, cells, inputs, gates, queries, attentions = saved
        read_by_gates, units = torch.cat([weight_output, weight_context], 1), outputs.shape[2]
        d_read, d_cell = outputs.new_zeros(outputs.shape[1], 2 * units), torch.zeros_like(cells[0])
        found = list[tuple[Tensor, ...]]()
        with torch.autocast(keys.device.type, enabled=False):
            for t in reversed(range(len(gates))):
                d_context, d_score, d_query = _context_backward(
                    queries[t], keys, direction, memory, attentions[t], d_contexts[t], d_read[:, units:], factors[t]
                )
                d_output = (d_outputs[t], d_read[:, :units], d_query @ weight_query)
                d_gate, d_cell = _stepped_backward(gates[t], cells[t], cells[t + 1], *d_output, d_cell)
                d_read = d_gate @ read_by_gates
                found.append((d_gate, d_context, d_score, d_query))
            d_gates, d_context, d_scores, d_queries = (torch.stack(each[::-1]) for each in zip(*found, strict=True))
            over_time = d_gates.flatten(0, 1).t()
            d_keys, d_direction = _keys_backward(queries, keys, direction, d_scores)
            return (
                d_gates,
                d_read[:, :units],
                d_cell,
                over_time @ outputs[:-1].flatten(0, 1),
                over_time @ inputs[:-1].flatten(0, 1),
                d_queries.flatten(0, 1).t() @ outputs[1:].flatten(0, 1),
                d_direction,
                d_keys,
                attentions.to(d_context.dtype).permute(1, 2, 0) @ d_context.transpose(0, 1),
                None,
                None,
            )


# What lies between two products


@fused
def _stepped(projected: Tensor, from_output: Tensor, from_context: Tensor, cell: Tensor) -> tuple[Tensor, ...]:
    """The gates before their functions, the output and the cell."""
    gates = (wide(projected) + from_output + from_context).to(projected.dtype)
    output, cell = lstm_cell(gates, cell)
    return gates, output, cell


def lstm_cell(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """The next output, in the type of the gates, and the next cell, in float32 at least."""
    into, forget, new, out = wide(gates).chunk(4, 1)
    cell = forget.sigmoid() * cell + into.sigmoid() * new.tanh()
    return (out.sigmoid() * cell.tanh()).to(gates.dtype), cell


@fused
def _stepped_backward(
    gates: Tensor,
    cell: Tensor,
    next_cell: Tensor,
    d_output: Tensor,
    d_output_next: Tensor,
    d_output_query: Tensor,
    d_cell: Tensor,
) -> tuple[Tensor, Tensor]:
    into, forget, new, out = wide(gates).chunk(4, 1)
    i, f, g, o, c = into.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid(), next_cell.tanh()
    d = wide(d_output) + d_output_next + d_output_query
    d_cell = d_cell + d * o * (1 - c * c)
    d_gates = [d_cell * g * i * (1 - i), d_cell * cell * f * (1 - f), d_cell * i * (1 - g * g), d * c * o * (1 - o)]
    return torch.cat(d_gates, 1).to(gates.dtype), d_cell * f


def attention_weights(query: Tensor, keys: Tensor, direction: Tensor, is_word: Tensor) -> Tensor:
    """How much of each word a query asks for: query (..., units), keys (..., words, units) -> (..., words)."""
    scores = (torch.tanh(wide(keys) + query.unsqueeze(-2)) * direction).sum(-1)
    return scores.masked_fill(~is_word, -torch.inf).softmax(-1)


@fused
def _context(
    query: Tensor, keys: Tensor, direction: Tensor, memory: Tensor, is_word: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """How much of each word is in the context, the context, and what dropout leaves of it."""
    attentions = attention_weights(query, keys, direction, is_word)
    context = (attentions.unsqueeze(2) * memory).sum(1).to(memory.dtype)
    return attentions, context, context * factors


@fused
def _context_backward(
    query: Tensor,
    keys: Tensor,
    direction: Tensor,
    memory: Tensor,
    attentions: Tensor,
    d_context: Tensor,
    d_dropped: Tensor,
    factors: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Derivatives by the context, the scores and the query."""
    d = wide(d_context) + d_dropped * factors
    d_attentions = (d.unsqueeze(1) * memory).sum(2)
    d_scores = attentions * (d_attentions - (attentions * d_attentions).sum(1, keepdim=True))
    slope = 1 - torch.tanh(wide(keys) + query.unsqueeze(1)).square()
    d_query = (d_scores.unsqueeze(2) * slope).sum(1) * direction
    return d.to(memory.dtype), d_scores, d_query.to(query.dtype)


_STEPS_IN_MEMORY = 4  # steps whose tanh is in memory at the same time, where nothing is compiled


def _keys_backward(queries: Tensor, keys: Tensor, direction: Tensor, d_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives by the keys and by the direction."""
    parts = 1 if keys.is_cuda else math.ceil(len(queries) / _STEPS_IN_MEMORY)
    slopes = values = wide(torch.zeros_like(keys))
    for some, d in zip(queries.chunk(parts), d_scores.chunk(parts), strict=True):
        slope, value = _over_time(some, keys, d)
        slopes, values = slopes + slope, values + value
    return (slopes * direction).to(keys.dtype), values.sum((0, 1))


@fused
def _over_time(queries: Tensor, keys: Tensor, d_scores: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over time of d_scores times tanh' and tanh of key and query."""
    values = torch.tanh(wide(keys).unsqueeze(0) + queries.unsqueeze(2))
    weighted = d_scores.unsqueeze(3)
    return (weighted * (1 - values * values)).sum(0), (weighted * values).sum(0)
