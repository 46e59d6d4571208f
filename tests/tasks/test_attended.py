"""The attending LSTM as one function: its derivative, and the whole fast network against a plain loop."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from plain_gnmt import plain_scores
from rewound.tasks.recipes.attended import Weights, attended
from rewound.tasks.recipes.gnmt import GNMT

WORDS, UNITS = 23, 6


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(5)


def test_its_derivative_is_that_of_its_value() -> None:
    batch, source, steps, units = 3, 4, 5, 2
    is_word = torch.arange(source) < torch.tensor([[4], [2], [1]])
    kept = F.dropout(torch.ones(steps, batch, units, dtype=torch.float64), 0.3)

    def outcome(*given: Tensor) -> tuple[Tensor, Tensor]:
        projected, output, cell, w_output, w_context, query, direction, keys, memory = given
        weights = Weights(w_output, w_context, query, direction)
        return attended(projected, (output, cell), weights, keys, memory, is_word, kept)

    matrices = numbers(4 * units, units), numbers(4 * units, units), numbers(units, units), numbers(units)
    state = numbers(steps, batch, 4 * units), numbers(batch, units), numbers(batch, units)
    memory = numbers(batch, source, units), numbers(batch, source, units)
    assert torch.autograd.gradcheck(outcome, (*state, *matrices, *memory), fast_mode=True)


def network(layers: int, dtype: torch.dtype, scale: float = 1.0) -> GNMT:
    model = GNMT(WORDS, layers=layers, units=UNITS, dropout=0.3, shares_embedding=layers > 2).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-scale, scale)
    return model


def sentences() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randint(WORDS, (5, 9)), torch.tensor([9, 1, 4, 8, 2]), torch.randint(WORDS, (5, 7))


def same_draws() -> Callable[[Tensor], Tensor]:
    """Dropout whose masks depend on how many were drawn before, and on nothing else."""
    draws = torch.Generator().manual_seed(7)

    def dropped(inputs: Tensor) -> Tensor:
        return inputs * (torch.rand(inputs.shape, generator=draws, dtype=torch.float64) < 0.7).to(inputs.dtype) / 0.7

    return dropped


def gradients(scores: Tensor, model: GNMT) -> dict[str, Tensor]:
    weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = torch.autograd.grad((scores.double() * weights).sum(), list(model.parameters()))
    return dict(zip((name for name, _ in model.named_parameters()), found, strict=True))


@pytest.mark.numeric
@pytest.mark.parametrize("layers", [2, 4])
@pytest.mark.parametrize("drops", [False, True])
def test_the_network_and_its_gradients_are_those_of_a_plain_loop(
    layers: int, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = network(layers, torch.float64), sentences()
    model.train(drops)
    monkeypatch.setattr(model, "_dropped", same_draws() if drops else lambda inputs: inputs)
    scores = model(*batch)
    expected = plain_scores(model, *batch, same_draws() if drops else lambda inputs: inputs)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)
    wanted = gradients(expected, model)
    for name, gradient in gradients(scores, model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=0, atol=1e-10, msg=name)


@pytest.mark.numeric
def test_a_cell_passes_through_padding_unchanged_in_float32() -> None:
    layer = network(2, torch.float32).encoder[0]
    short, is_word = torch.randn(3, 4, 2 * UNITS), torch.ones(3, 4, dtype=torch.bool)
    _, output, cell = layer(short, is_word)
    longer, after = torch.cat([short, torch.randn(20, 4, 2 * UNITS)]), torch.cat([is_word, is_word.new_zeros(20, 4)])
    outputs, same_output, same_cell = layer(longer, after)
    assert torch.equal(output, same_output)
    assert torch.equal(cell, same_cell)
    assert outputs[3:].eq(0).all()
    # Backwards the padding comes first, and the state stays at zero.
    _, same_output, same_cell = layer(torch.cat([torch.randn(20, 4, 2 * UNITS), short]), after.flip(0))
    assert torch.equal(output, same_output)
    assert torch.equal(cell, same_cell)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_lower_precision_it_is_nearly_the_same(dtype: torch.dtype) -> None:
    exact, batch = network(4, torch.float64, 0.5).eval(), sentences()
    model = network(4, torch.float32)
    model.load_state_dict(exact.state_dict())
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
        scores = model.eval()(*batch)
    expected = exact(*batch)
    # Some hundred roundings follow each other, which add up like a random walk; each is half a unit in the last place.
    limit = 10 * torch.finfo(dtype).eps
    assert scores.dtype == dtype
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=limit * float(expected.detach().abs().max()))
    wanted = gradients(expected, exact)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in gradients(scores, model).items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient.double(), wanted[name], rtol=0, atol=limit * largest, msg=name)


def test_other_weights_can_be_put_in_its_place_as_a_captured_step_does() -> None:
    model, other, batch = network(2, torch.float64).eval(), network(2, torch.float64).eval(), sentences()
    leaves = {name: parameter.detach().requires_grad_() for name, parameter in other.named_parameters()}
    found = torch.autograd.grad(functional_call(model, leaves, batch).sum(), list(leaves.values()))
    expected = torch.autograd.grad(other(*batch).sum(), list(other.parameters()))
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.numeric
def test_hypotheses_of_a_sentence_share_its_memory() -> None:
    model, (source, lengths, _) = network(4, torch.float64).eval(), sentences()
    memory, state = model.encoded(source, lengths)
    repeated = type(memory)(*(tensor.repeat_interleave(3, 0) for tensor in memory))
    words = torch.randint(WORDS, (15,))
    several = type(state)(
        tuple(torch.randn(15, UNITS).double() for _ in state.outputs),
        tuple(torch.randn(15, UNITS).double() for _ in state.cells),
        torch.randn(15, UNITS).double(),
    )
    scores, _, attended_to = model.step(words, several, memory)
    expected, _, expected_attention = model.step(words, several, repeated)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(attended_to, expected_attention, rtol=0, atol=1e-12)
