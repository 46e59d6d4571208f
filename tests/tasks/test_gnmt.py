"""The translation network of the paper: counts, a second implementation in float64, and decoding word by word."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rewound.foundations.errors import InputError
from rewound.tasks.recipes.gnmt import GNMT, NO_WORD, smoothed_loss

Array = NDArray[np.float64]


def test_the_paper_s_network_has_its_parameters() -> None:
    with torch.device("meta"):
        shared, separate = (GNMT(32_316, shares_embedding=shares) for shares in (True, False))

    def count(model: GNMT, *prefixes: str) -> int:
        return sum(p.numel() for name, p in model.named_parameters() if name.startswith(prefixes))

    assert count(shared, "forward_encoder", "backward_encoder", "encoder") == 46_157_824
    assert count(shared, "decoder") == 50_348_032
    assert count(shared, "attention") == 2_099_201
    assert count(shared, "") == 164_788_225
    assert count(separate, "") == 197_879_809


def small(layers: int = 4, dropout: float = 0.2) -> GNMT:
    model = GNMT(11, layers=layers, units=5, dropout=dropout, generator=torch.Generator().manual_seed(1)).double()
    with torch.no_grad():
        for parameter in model.parameters():  # large ones, biases too: a wrong gate or order then shows
            parameter.uniform_(-1.5, 1.5, generator=torch.Generator().manual_seed(parameter.numel()))
    return model.eval()


SOURCE = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0], [9, 0, 0, 0]])
LENGTHS = torch.tensor([4, 2, 1])
TARGET = torch.tensor([[1, 5, 6], [1, 7, 0], [1, 8, 9]])


@pytest.mark.numeric
@pytest.mark.parametrize("layers", [2, 4])
def test_it_computes_what_a_second_implementation_does(layers: int) -> None:
    model = small(layers)
    scores = model(SOURCE, LENGTHS, TARGET)
    for sentence, (words, length, target) in enumerate(zip(SOURCE, LENGTHS, TARGET, strict=True)):
        expected = second_implementation(model, layers, words[:length].tolist(), target.tolist())
        np.testing.assert_allclose(scores[sentence].detach().numpy(), expected, rtol=0, atol=1e-12)


def second_implementation(model: GNMT, layers: int, source: list[int], target: list[int]) -> Array:
    """One sentence, one word, one cell at a time, from the equations of the paper's network."""
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}

    def sigmoid(x: Array) -> Array:
        return 1 / (1 + np.exp(-x))

    def cell(name: str, x: Array, h: Array, c: Array) -> tuple[Array, Array]:
        z = weights[f"{name}.weight_ih"] @ x + weights[f"{name}.weight_hh"] @ h + weights[f"{name}.bias"]
        i, f, j, o = (z[k * len(h) : (k + 1) * len(h)] for k in range(4))
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(j)
        return sigmoid(o) * np.tanh(c), c

    def run(name: str, xs: list[Array]) -> tuple[list[Array], Array, Array]:
        h = c = np.zeros(len(weights[f"{name}.bias"]) // 4)
        hs = []
        for x in xs:
            h, c = cell(name, x, h, c)
            hs.append(h)
        return hs, h, c

    embedding = weights["target_embedding.weight"]
    embedded = [embedding[word] for word in source]
    ahead, _, _ = run("forward_encoder", embedded)
    back, h, c = run("backward_encoder", embedded[::-1])
    states = [(h, c)]
    xs = [np.concatenate(both) for both in zip(ahead, back[::-1], strict=True)]
    for layer in range(layers - 1):
        hs, h, c = run(f"encoder.{layer}", xs)
        xs = [x + y for x, y in zip(xs, hs, strict=True)] if layer else hs
        states.append((h, c))
    v = weights["attention.v"]
    direction = weights["attention.g"] * v / math.sqrt(sum(x * x for x in v))
    context, scores = np.zeros_like(h), []
    for word in target:
        h, c = states[0] = cell("decoder.0", np.concatenate([embedding[word], context]), *states[0])
        query = weights["attention.query.weight"] @ h
        energies = [
            direction @ np.tanh(weights["attention.key.weight"] @ x + query + weights["attention.b"]) for x in xs
        ]
        shares = np.exp(energies) / np.sum(np.exp(energies))
        context = sum((share * x for share, x in zip(shares, xs, strict=True)), start=np.zeros_like(h))
        y = h
        for layer in range(1, layers):
            h, c = states[layer] = cell(f"decoder.{layer}", np.concatenate([y, context]), *states[layer])
            y = y + h if layer > 1 else h
        scores.append(weights["projection.weight"] @ y)
    return np.stack(scores)


@pytest.mark.numeric
def test_decoding_word_by_word_gives_what_teacher_forcing_does() -> None:
    model = small()
    expected = model(SOURCE, LENGTHS, TARGET)
    memory, state = model.encoded(SOURCE, LENGTHS)
    for position, words in enumerate(TARGET.unbind(1)):
        scores, state, attended = model.step(words, state, memory)
        torch.testing.assert_close(scores, expected[:, position], rtol=0, atol=1e-12)
        torch.testing.assert_close(attended.sum(1), torch.ones(3).double())
        assert attended[1, 2:].eq(0).all()
        assert attended[2, 1:].eq(0).all()


def test_what_is_behind_a_sentence_changes_nothing() -> None:
    model = small()
    other, longer = SOURCE.clone(), torch.cat([SOURCE, SOURCE], 1)
    other[1, 2:], other[2, 1:] = 10, 10
    scores = model(SOURCE, LENGTHS, TARGET)
    assert torch.equal(model(other, LENGTHS, TARGET), scores)
    torch.testing.assert_close(model(longer, LENGTHS, TARGET), scores, rtol=0, atol=1e-12)


def test_dropout_falls_on_inputs_while_it_trains_and_not_on_what_is_added() -> None:
    model = small(dropout=1.0 - 1e-9)  # everything is dropped
    trained = model.train()(SOURCE, LENGTHS, TARGET)
    with torch.no_grad():
        for layer in model.decoder[2:]:
            layer.weight_hh.zero_()
            layer.bias.zero_()
    # Layers from the third on now put out nothing of their own, and pass on what they are given.
    passed = model(SOURCE, LENGTHS, TARGET)
    assert passed.abs().sum() > 0
    assert not torch.equal(trained, model.eval()(SOURCE, LENGTHS, TARGET))


def test_all_starts_within_a_tenth_and_biases_at_zero() -> None:
    model = GNMT(50, units=16, generator=torch.Generator().manual_seed(3))
    again = GNMT(50, units=16, generator=torch.Generator().manual_seed(3))
    for (name, one), (_, two) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, two)
        if name.endswith("bias") or name == "attention.b":
            assert one.eq(0).all()
        elif name == "attention.g":
            assert one.item() == 0.25
        else:
            assert 0.05 < one.abs().max() <= 0.1
    assert all(a.data_ptr() != b.data_ptr() for a, b in pairwise(model.parameters()))


@pytest.mark.numeric
def test_the_loss_is_a_sum_over_words_with_smoothed_labels() -> None:
    draw = torch.Generator().manual_seed(6)
    scores = torch.randn(2, 3, 7, dtype=torch.float64, generator=draw)
    following = torch.tensor([[1, 6, 2], [3, NO_WORD, NO_WORD]])
    expected = 0.0
    for row, word in zip(scores.flatten(0, 1), following.flatten().tolist(), strict=True):
        if word != NO_WORD:
            wanted = torch.full((7,), 0.1 / 7, dtype=torch.float64)
            wanted[word] += 0.9
            expected -= float(wanted @ row.log_softmax(0))
    assert float(smoothed_loss(scores, following, 0.1)) == pytest.approx(expected, rel=1e-12)


def test_a_vocabulary_of_any_size_is_projected_in_sixteen_bits() -> None:
    model = small().float()  # eleven words
    scores = model(SOURCE, LENGTHS, TARGET)
    with torch.autocast("cpu", torch.bfloat16):
        less = model(SOURCE, LENGTHS, TARGET)
    assert less.shape == scores.shape
    assert less.dtype == torch.bfloat16
    assert (less - scores).abs().max() < 0.1 * scores.abs().max()


def test_one_layer_is_refused() -> None:
    with pytest.raises(InputError, match="layers must be at least 2, not 1"):
        GNMT(11, layers=1)
