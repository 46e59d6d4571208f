"""A level of an own loop whose weights are not finite at its end is noticed, whichever it is, and never saved."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rewound import Diverged, Epochs, InputError
from rewound.loops import iteration
from sameness import assert_same
from training_loops import Loop, T

COMPRESSION = 1.5  # two levels
BROKEN = [math.nan, math.inf, -math.inf]


def over(
    loop: Loop,
    run: Epochs,
    diverges_in: int | None,
    value: float = math.nan,
    score: Callable[[Epochs], float] | None = lambda run: 0.9,
) -> dict[int, dict[str, Tensor]]:
    """Train; in one level the first weight becomes `value` in its first epoch. What each level ended with."""
    ends: dict[int, dict[str, Tensor]] = {}
    for epoch in run:
        loop.train(epoch)
        if run.level == diverges_in:
            with torch.no_grad():
                loop.model[0].weight[0, run.mask["0.weight"][0].nonzero()[0] if run.mask else 0] = value  # type: ignore[index]
        ends[run.level] = copy.deepcopy(loop.model.state_dict())
        if score is not None:
            run.report(score(run))
    return ends


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("value", BROKEN)
def test_a_level_that_is_not_finite_is_an_error(level: int, value: float) -> None:
    loop = Loop()
    which = f"level {level} of 2" if level else "the dense run"
    remedy = "or give max_drop= to get the levels before it$" if level else "clip the gradients$"
    message = rf"^{which} diverged: by epoch {T * (level + 1)} 0\.weight.* held numbers that are not finite; .*{remedy}"
    with pytest.raises(Diverged, match=message) as failure:
        over(loop, loop.run(compression=COMPRESSION), level, value, score=None)
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("level", [1, 2])
def test_with_max_drop_the_levels_before_it_are_returned(level: int, checkpoint: bool, tmp_path: Path) -> None:
    loop = Loop()
    run = loop.run(compression=COMPRESSION, max_drop=0.1, checkpoint=tmp_path if checkpoint else None)
    ends = over(loop, run, level)
    assert [reached.level for reached in run.levels] == list(range(level))
    assert_same(loop.model.state_dict(), ends[level - 1])
    assert (run.mask is None) == (level == 1)
    assert f"level {level} of 2 diverged: by epoch {T * (level + 1)} 0.weight" in loop.said[-2]
    assert loop.said[-2].endswith("; the levels before it remain")


def test_the_dense_run_has_no_level_before_it() -> None:
    loop = Loop()
    with pytest.raises(Diverged, match="the dense run diverged"):
        over(loop, loop.run(compression=COMPRESSION, max_drop=0.1), 0)


def test_an_adopted_network_that_is_not_finite_is_refused_at_once() -> None:
    loop = Loop()
    with torch.no_grad():
        loop.model[0].weight[0, 0] = math.nan
    with pytest.raises(Diverged, match="the dense run diverged"):
        next(iter(loop.run(compression=COMPRESSION, adopt=True)))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_the_last_good_state_stays_and_the_script_goes_on_from_it(
    level: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iteration, "SAVE_SECONDS", 0.0)  # so that the state is saved after every epoch
    whole = Loop()
    over(whole, whole.run(compression=COMPRESSION), None)
    loop = Loop()
    with pytest.raises(Diverged, match=f"by epoch {T * level + 1} "):  # noticed when it was to be saved
        over(loop, loop.run(compression=COMPRESSION, checkpoint=tmp_path), level)
    for file in tmp_path.glob("*.pt"):
        assert all(bool(t.isfinite().all()) for t in torch.load(file, weights_only=True)["model"].values()), file
    again = Loop()
    run = again.run(compression=COMPRESSION, checkpoint=tmp_path)
    assert run.epochs_done == T * level
    over(again, run, None)
    assert_same(again.model.state_dict(), whole.model.state_dict())


def test_a_loss_that_is_not_finite_tells_why() -> None:
    loop = Loop()
    with pytest.raises(Diverged, match="level 1 of 2 diverged"):
        over(loop, loop.run(compression=COMPRESSION), 1, score=lambda run: math.nan if run.level else 0.9)
    loop = Loop()
    run = loop.run(compression=COMPRESSION, max_drop=0.1)
    over(loop, run, 1, score=lambda run: math.nan if run.level else 0.9)
    assert [reached.level for reached in run.levels] == [0]
    loop = Loop()
    with pytest.raises(InputError, match="evaluated on nothing, or its outputs are not finite although its weights"):
        over(loop, loop.run(compression=COMPRESSION), None, score=lambda run: math.nan)


def test_statistics_of_a_normalisation_count_and_other_buffers_do_not() -> None:
    loop = Loop()
    loop.model.register_buffer("causal", torch.full((2, 2), -math.inf))
    loop.over(loop.run(compression=COMPRESSION))
    loop = Loop()
    run = loop.run(compression=COMPRESSION)
    with pytest.raises(Diverged, match=r"1\.running_mean held"):  # noqa: PT012
        for epoch in run:
            loop.train(epoch)
            loop.model[1].running_mean.fill_(math.nan)  # type: ignore[union-attr, operator]
