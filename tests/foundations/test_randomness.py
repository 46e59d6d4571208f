"""Draws as a function of where they are used: pinned values, a plain splitmix64, and how even they are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rewound.foundations.randomness import bits, fold, integers, permutation

KEYS = st.integers(0, 2**63 - 1)
COUNTERS = st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=20)

_ALL = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """One output of Steele, Lea and Flood's generator in Python's own integers, from the state after its increment."""
    z = state & _ALL
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _ALL
    return z ^ (z >> 31)


def by_hand(key: int, counter: int) -> int:
    return splitmix64(key + (counter + 1) * 0x9E3779B97F4A7C15) & ((1 << 63) - 1)


def test_the_reference_is_splitmix64() -> None:
    """The published first outputs for the seed 1234567."""
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + 0x9E3779B97F4A7C15) & _ALL
        outputs.append(splitmix64(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(KEYS, COUNTERS)
@settings(deadline=None)
def test_bits_are_splitmix64_on_any_device(key: int, counters: list[int]) -> None:
    expected = [by_hand(key, counter) for counter in counters]
    assert bits(key, torch.tensor(counters)).tolist() == expected
    assert bits(torch.tensor(key), torch.tensor(counters)).tolist() == expected  # a key in device memory
    assert all(0 <= value < 2**63 for value in expected)


@given(KEYS, COUNTERS, st.integers(1, 1000))
@settings(deadline=None)
def test_integers_are_the_remainder(key: int, counters: list[int], high: int) -> None:
    drawn = integers(key, torch.tensor(counters), high).tolist()
    assert drawn == [by_hand(key, counter) % high for counter in counters]


@given(KEYS, st.integers(0, 300))
@settings(deadline=None)
def test_a_permutation_is_one(key: int, n: int) -> None:
    order = permutation(key, n)
    assert sorted(order.tolist()) == list(range(n))
    assert order.tolist() == sorted(range(n), key=lambda i: by_hand(key, i))


def test_answers_that_stored_results_depend_on() -> None:
    assert fold(1, "init") == 1235239524417140549
    assert fold(1, 0, 17) == 9046866054151835992
    assert bits(7, torch.arange(3)).tolist() == [7191089600892374487, 309689372594955804, 7392729709960833538]
    assert permutation(3, 8).tolist() == [3, 2, 0, 6, 5, 1, 4, 7]


def test_a_key_is_a_function_of_its_whole_path() -> None:
    paths = [(1, 2), (2, 1), (12,), (1, "2"), ("1", 2), (1, 2, 0), (1,), (), ("1, 2",), (-1, 2)]
    assert len({fold(*path) for path in paths}) == len(paths)
    assert all(fold(*path) == fold(*path) for path in paths)
    assert all(0 <= fold(n) < 2**63 for n in range(1000))


def test_draws_do_not_depend_on_what_was_drawn_before() -> None:
    whole = integers(5, torch.arange(100), 10)
    torch.manual_seed(1)
    torch.rand(7)
    assert torch.equal(integers(5, torch.arange(60, 100), 10), whole[60:])
    assert integers(5, torch.tensor([41]), 10).item() == whole[41].item()


@pytest.mark.parametrize("high", [2, 3, 9])
@pytest.mark.parametrize("key", [0, 1, fold("augmentation")])
def test_integers_are_even(key: int, high: int) -> None:
    n = 20_000
    counts = torch.bincount(integers(key, torch.arange(n), high), minlength=high).double()
    chi_squared = ((counts - n / high).square() / (n / high)).sum().item()
    assert chi_squared < 30  # 99.9% lie below 26.1 for the nine values, with eight degrees of freedom


def test_neighbouring_counters_and_keys_are_unrelated() -> None:
    n = 20_000
    drawn = integers(3, torch.arange(n + 1), 2).double()
    other = integers(4, torch.arange(n + 1), 2).double()
    for one, two in ((drawn[1:], drawn[:-1]), (drawn, other)):
        agree = (one == two).double().mean().item()
        assert abs(agree - 0.5) < 5 * 0.5 / n**0.5


def test_permutations_put_everything_everywhere() -> None:
    firsts = torch.tensor([permutation(fold(epoch), 10)[0].item() for epoch in range(2_000)])
    counts = torch.bincount(firsts, minlength=10)
    assert counts.min() > 140  # 200 expected, deviation 13
    assert counts.max() < 260


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: run `pytest -m cuda` there")
def test_cuda_draws_the_same() -> None:
    counters = torch.arange(-1000, 1000)
    assert torch.equal(bits(9, counters), bits(9, counters.cuda()).cpu())
    assert torch.equal(permutation(9, 50_000), permutation(9, 50_000, "cuda").cpu())
