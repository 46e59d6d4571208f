"""Translation as the authors train it: schedule, batches by length, the loss, pruning, BLEU by beam search."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rewound import InputError, Position, begin
from rewound.experiments.plans.planning import plan
from rewound.experiments.plans.realisation import Realised, pruned
from rewound.experiments.sweeps.declaration import shipped_sweeps
from rewound.experiments.sweeps.sweep import load_sweep, parse_sweep
from rewound.method.pruning.mask import Mask
from rewound.method.schedule import Segment
from rewound.states.history import Pruned
from rewound.states.storage.store import Store
from rewound.tasks.datasets import parallel_text
from rewound.tasks.datasets.parallel_text import END, START, Corpus, HeldOut, Pairs
from rewound.tasks.fleets.captured import Program, capturable
from rewound.tasks.fleets.place import Place, Run
from rewound.tasks.recipe import Batch
from rewound.tasks.recipes import recipe_named
from rewound.tasks.recipes.gnmt import GNMT
from rewound.tasks.recipes.translation import WMT16, EnDe, Multi30k, Toy, Translation
from rewound.tasks.training import State, loaded
from small_fleets import CPU, ROUNDING, alone, furthest, sparse, stopped

SMALL = Toy(width=8, dropout=0.0)

# As the authors train


def test_the_schedule_is_the_authors_at_every_boundary() -> None:
    schedule = WMT16().schedule
    assert schedule.steps == 8_630
    assert [schedule.at(step) for step in (0, 100, 200)] == pytest.approx([2e-5, 2e-4, 2e-3])
    assert schedule.at(199) == pytest.approx(0.002 * 0.01 ** (1 / 200))
    halved = {6_471: 1, 6_472: 2, 7_190: 2, 7_191: 4, 7_909: 4, 7_910: 8, 8_628: 8, 8_629: 16}
    assert {step: schedule.at(step) for step in halved} == pytest.approx({s: 0.002 / by for s, by in halved.items()})
    assert schedule.at(8_630) == schedule.final == pytest.approx(2.5e-4), "the authors' own, after the end"
    assert [WMT16().steps_of(epochs) for epochs in (0.5, 1, 4.5, 5)] == [863, 1_726, 7_767, 8_630]


@pytest.mark.parametrize("epochs", [0.02, 0.05, 0.1, 1 / 3, 1, 12])
def test_short_trainings_have_schedules_too(epochs: float) -> None:
    schedule = Toy(epochs=epochs, warmup=0).schedule
    assert schedule.at(0) == schedule.peak == 0.01
    assert schedule.final == 0.01 / 8


def test_a_long_warm_up_takes_no_halving_away() -> None:
    """The halvings of 60 steps are at 45, 50 and 55."""
    schedule = Toy(epochs=1.0, steps_per_epoch=60.0, warmup=52).schedule
    assert [schedule.at(step) for step in (52, 54, 55, 59, 60)] == [0.01 / 4] * 2 + [0.01 / 8] * 3


def test_everything_is_pruned_but_the_scale_of_attention() -> None:
    names = {name for name, _ in SMALL.skeleton.named_parameters()}
    assert names - SMALL.shapes.keys() == {"attention.g"}
    assert {"attention.v", "attention.b", "decoder.0.bias", "target_embedding.weight"} <= SMALL.shapes.keys()


@pytest.mark.usefixtures("float64")
def test_the_loss_is_the_sum_over_words_with_smoothed_labels() -> None:
    model = SMALL.model(3).requires_grad_(False)
    sources, targets = [[5, 6, 7], [8]], [[9, 10], [11, 12, 13, 14]]
    padded = torch.full((2, 4), END)
    source, target, following = padded.clone(), torch.full((2, 5), END), torch.full((2, 5), -100)
    by_hand = 0.0
    for row, (heard, said) in enumerate(zip(sources, targets, strict=True)):
        source[row, : len(heard)] = torch.tensor(heard)
        target[row, : len(said) + 1] = torch.tensor([START, *said])
        following[row, : len(said) + 1] = torch.tensor([*said, END])
        scores = model(torch.tensor([heard]), torch.tensor([len(heard)]), torch.tensor([[START, *said]]))[0]
        for word, likelihoods in zip([*said, END], scores.log_softmax(1), strict=True):
            by_hand -= 0.9 * float(likelihoods[word]) + 0.1 * float(likelihoods.mean())
    batch = (source, torch.tensor([3, 1]), target, following)
    # Fourteen sums of 450 terms, each rounded at 1e-16.
    assert float(SMALL.loss(model, batch)) == pytest.approx(by_hand, rel=1e-12)


def test_multiply_adds_are_those_of_each_matrix_at_each_position() -> None:
    recipe, words = Toy(width=8, layers=3), 47
    encoder = (8 + 8) * 4 * 8 * 2 + (16 + 8) * 4 * 8 + (8 + 8) * 4 * 8
    decoder = 3 * (16 + 8) * 4 * 8
    attention = (8 * 8) * 2 * words + 8 * words * words  # keys and queries; the vector, at each pair of words
    contexts = 8 * words * words
    assert recipe.profile.total() == words * (encoder + decoder + 8 * 450) + attention + contexts


# Batches by length


def text_of(lengths: Sequence[tuple[int, int]]) -> Corpus:
    """Pairs of so many words, each word a different number of its pair."""
    source, target = zip(*lengths, strict=True)
    words = [torch.arange(sum(side), dtype=torch.int32) + 3 for side in (source, target)]
    pairs = Pairs(words[0], torch.tensor(source), words[1], torch.tensor(target))
    held = HeldOut(torch.tensor([3], dtype=torch.int32), torch.tensor([1]), ("Hallo.",))
    return Corpus(tuple(map(str, range(450))), pairs, {"val": held, "test": held})


def with_text(monkeypatch: pytest.MonkeyPatch, lengths: Sequence[tuple[int, int]]) -> Corpus:
    text = text_of(lengths)
    monkeypatch.setattr(parallel_text, "toy", lambda: text)
    return text


def drawn(recipe: Translation, count: int) -> list[Batch]:
    return list(islice(recipe.batches(4, Position(0, 0), CPU), count))


def test_every_pair_comes_once_an_epoch_with_others_of_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [
        (3, 4),
        (9, 2),
        (5, 5),
        (1, 8),
        (12, 3),
        (10, 18),
        (4, 15),
        (11, 11),
        (47, 1),
        (2, 40),
        (44, 44),
        (46, 41),
    ]
    with_text(monkeypatch, lengths)
    recipe = replace(SMALL, batch_size=2)
    assert [(part.examples, part.batch_size) for part in recipe.parts] == [(4, 2), (4, 2), (4, 2)]
    seen = Counter[tuple[int, int]]()
    for source, counts, target, following in drawn(recipe, 6):
        assert source.shape[1] in (9, 19, 47)
        assert target.shape[1] == following.shape[1] == source.shape[1] + 1
        for row in range(2):
            heard, said = int(counts[row]), int((following[row] != -100).sum()) - 1
            seen[heard, said] += 1
            assert source[row, :heard].diff().eq(1).all(), "the words of one sentence, in their order"
            assert source[row, heard:].eq(END).all()
            assert target[row, 0] == START
            assert torch.equal(target[row, 1 : said + 1], following[row, :said])
            assert following[row, said] == END
    assert seen == Counter(lengths)


def test_lengths_with_too_few_pairs_for_a_step_join_the_next_shorter_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with_text(monkeypatch, [*[(3, 3)] * 4, *[(33, 30)] * 3, (45, 2)])
    recipe = replace(SMALL, batch_size=2, accumulation=2)
    assert [part.examples for part in recipe.parts] == [4, 4]
    assert {source.shape[1] for source, *_ in drawn(recipe, 4)} == {9, 47}
    with_text(monkeypatch, [(3, 3), *[(33, 30)] * 4])
    assert [part.examples for part in recipe.parts] == [5], "short ones join the longer, if nothing else is left"
    with_text(monkeypatch, [(3, 3)] * 3)
    with pytest.raises(InputError, match="3 pairs of sentences are fewer than the 4 of a step; lower batch-size"):
        _ = recipe.parts


@pytest.mark.usefixtures("float64", "one_thread")
@pytest.mark.parametrize("fields", [{}, {"accumulation": 2}, {"layers": 3, "dropout": 0.3}])
def test_the_captured_step_is_the_step_of_train_and_masks_hold(fields: dict[str, int]) -> None:
    recipe = replace(SMALL, batch_size=4, **fields)
    assert capturable(recipe, CPU)
    mask = Mask({**sparse(recipe), "attention.v": torch.arange(8) > 2, "decoder.0.bias": torch.arange(32) > 9})
    run = Run(begin(recipe, 3), mask, [Segment(0.01, 3), Segment(0.001, 2)], [1, 4])
    place = Place(Program(recipe, CPU, None))
    place.start(run)
    for expected in alone(recipe, run):
        _, state, _ = stopped(place)
        assert isinstance(state, State)
        assert furthest(state, expected) < ROUNDING
        assert all((state.model[name][~kept] == 0).all() for name, kept in mask.items())


# Translations and their BLEU


class Parrot(GNMT):
    """Says one word, for so long as it lives."""

    def step(self, words: Tensor, *others: object) -> tuple[Tensor, ...]:  # type: ignore[override]
        scores, *rest = super().step(words, *others)  # type: ignore[arg-type]
        return torch.full_like(scores, -50).index_fill(1, torch.tensor(self.word), 50.0), *rest

    word = END


def test_a_translation_that_never_ends_is_cut_off_and_an_empty_one_has_no_bleu() -> None:
    model, text = Parrot(450, layers=2, units=8).eval(), parallel_text.toy()
    recipe = replace(SMALL, most_words=6, beam_width=2)
    assert recipe.evaluate(model) == (0, 0)
    assert set(recipe.translations(model, text.held_out["val"], text.vocabulary)) == {""}
    model.word = next(number for number, word in enumerate(text.vocabulary) if word.endswith("Hund"))
    (said,) = set(recipe.translations(model, text.held_out["val"], text.vocabulary))
    assert said.count("Hund") == 6
    assert all(0 <= score < 20 for score in recipe.evaluate(model))


def test_sentences_are_translated_in_their_order_whatever_they_are_batched_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, model = parallel_text.toy(), replace(SMALL, width=16).model(7).eval()
    held = text.held_out["val"]
    recipe = replace(SMALL, width=16, most_words=8)
    whole = recipe.translations(model, held, text.vocabulary)
    monkeypatch.setattr("rewound.tasks.recipes.translation._TRANSLATED_AT_ONCE", 7)
    assert recipe.translations(model, held, text.vocabulary) == whole
    assert len(set(whole)) > 1


def test_a_network_whose_scores_are_no_numbers_has_no_bleu() -> None:
    model = SMALL.model(1).eval()
    with torch.no_grad():
        model.attention.v.zero_()  # whose norm scores are divided by
    assert all(map(math.isnan, SMALL.evaluate(model)))


@pytest.mark.filterwarnings("ignore:less than 1%")  # biases, which begin at zero
def test_a_pruned_state_is_pruned_under_both_names_of_the_shared_embedding() -> None:
    table = {"recipe": "translate-toy", "trials": [1], "recipe-fields": {"width": 8, "epochs": 0.1, "warmup": 1}}
    sweep = parse_sweep({**table, "experiment": [{"technique": "fine-tuning", "retrain-epochs": 0.1, "density": 0.2}]})
    root = next(target.state.root for target in sweep.targets if isinstance(target.state.root, Pruned))
    dense = begin(sweep.recipe, 1)
    found = pruned(root, Realised(dense, None), Store.__new__(Store), CPU, print)
    assert found.mask is not None
    model = loaded(sweep.recipe, found.state)
    for name, kept in found.mask.items():
        assert (model.get_parameter(name)[~kept] == 0).all(), name
    assert found.state.model["source_embedding.weight"].count_nonzero() < 0.4 * 450 * 8


@pytest.mark.slow
def test_a_small_network_learns_to_translate() -> None:
    recipe = Toy(epochs=2.0, width=48)
    first, last = (
        state.loss for state in alone(recipe, Run(begin(recipe, 1), None, recipe.schedule.segments(0, 120), [20]))
    )
    assert last < 0.75 * first


# Wrong input


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 1}, "layers must be at least 2, not 1"),
        ({"width": 0}, "width must be above 0 and finite, not 0"),
        ({"epochs": math.inf}, "epochs must be"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1, not 1"),
        ({"warmup": 744}, "warmup must be shorter than the 744 steps of the training, not 744"),
        ({"beam-width": 500}, "beam-width must be at most the vocabulary's 450, not 500"),
        ({"most-words": 0}, "most-words must be above 0 and finite, not 0"),
        ({"precision": "half"}, "precision is float32 or bfloat16, not 'half'"),
        ({"clip-norm": 0.0}, "clip-norm must be above 0, not 0"),
    ],
)
def test_fields_that_cannot_be_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        begin(recipe_named("translate-toy").with_fields(fields), 1)


def test_a_vocabulary_of_another_size_is_refused() -> None:
    recipe = Toy(vocabulary=300)
    message = "the vocabulary of toy has 450 words, and the network of translate-toy takes 300; give the recipe "
    with pytest.raises(InputError, match=message + "vocabulary = 450"):
        next(recipe.batches(1, Position(0, 0), CPU))
    with pytest.raises(InputError, match=message):
        recipe.evaluate(recipe.model(1))


@pytest.mark.parametrize("recipe", [WMT16(), EnDe(), Multi30k()])
def test_missing_text_is_told_before_any_work(
    recipe: Translation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REWOUND_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=f"no {recipe.corpus} in .*rewound data {recipe.corpus} --from"):
        recipe.check_data()


@pytest.mark.parametrize(
    "name",
    [name for name in shipped_sweeps() if name.startswith(("ende", "multi30k")) or name == "wmt16-gnmt-algorithm1"],
)
def test_sweeps_plan_without_data(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWOUND_CACHE", str(tmp_path))
    sweep = load_sweep(name)
    assert len(plan(sweep.targets).nodes) > 0
    assert sweep.recipe.metric.unit == "BLEU"


def test_the_paper_s_grids_have_its_networks() -> None:
    """3,750 one-shot and 3,000 iterative ones were published."""
    pruned = {
        name: sum(target.technique != "" for target in load_sweep(f"wmt16-gnmt-{name}").targets)
        for name in ("oneshot", "iterative", "algorithm1")
    }
    assert pruned == {"oneshot": 3_750, "iterative": 3_000, "algorithm1": 225}
    assert math.isclose(load_sweep("wmt16-gnmt-iterative").recipe.steps_per_epoch, 1_726)
