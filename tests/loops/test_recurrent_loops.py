"""A loop of one's own over sentences of different lengths: LSTMs with weights in one piece, as cuDNN wants them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import Adam, lr_scheduler

import rewound

pytestmark = pytest.mark.usefixtures("one_thread")

T, BATCHES, WORDS, CLIP = 2, 4, 11, 0.1
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]


class Translator(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU] = nn.LSTM) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.reader = kind(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.writer = kind(10, 5, batch_first=True)
        self.out = nn.Linear(5, WORDS)

    def forward(self, source: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(source), lengths, batch_first=True, enforce_sorted=False)
        found: Tensor = self.out(self.writer(pad_packed_sequence(self.reader(packed)[0], batch_first=True)[0])[0])
        return found


class First(nn.Module):
    """The outputs of a recurrent layer, without its state."""

    def forward(self, found: tuple[Tensor, object]) -> Tensor:
        return found[0]


def batches(epoch: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of one length each, give or take a word; every other epoch has a batch more."""
    dice = torch.Generator().manual_seed(epoch)
    for number in range(BATCHES + epoch % 2):
        lengths = 3 + number + torch.randint(2, (4,), generator=dice)
        words = torch.randint(1, WORDS, (4, int(lengths.max())), generator=dice)
        yield words.where(torch.arange(words.shape[1]) < lengths[:, None], 0).to(device), lengths


def flatten(model: nn.Module) -> None:
    """Put the weights of each recurrent layer into one piece of memory, anew: cuDNN's own, and on a CPU its like."""
    for layer in model.modules():
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()
            if not next(layer.parameters()).is_cuda:
                piece = torch.cat([weight.detach().flatten() for weight in layer.parameters()])
                parts = piece.split([weight.numel() for weight in layer.parameters()])
                for weight, part in zip(layer.parameters(), parts, strict=True):
                    weight.data = part.view_as(weight)


class Loop:
    """A script that trains a translator, with warm-up and clipping."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU] = nn.LSTM, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.model, self.device = Translator(kind).to(device), device
        self.optimizer = Adam(self.model.parameters(), lr=1e-2)
        warm_up = lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=BATCHES)
        halvings = lr_scheduler.MultiStepLR(self.optimizer, [6], gamma=0.5)
        self.scheduler = lr_scheduler.ChainedScheduler([warm_up, halvings])
        self.rates: list[list[float]] = []

    def run(self, **options: object) -> rewound.Epochs:
        given = {"compression": 4, "rate": 0.5, "say": lambda line: None, **options}
        return rewound.epochs(T, self.model, self.optimizer, self.scheduler, **given)  # type: ignore[arg-type]

    def train(self, epoch: int) -> Iterator[Tensor]:
        """One epoch; yields the norm of the gradients before they were clipped, after each step."""
        self.rates.append([])
        for source, lengths in batches(epoch, self.device):
            self.optimizer.zero_grad()
            scores = self.model(source, lengths)
            nn.functional.cross_entropy(scores.mT, source, ignore_index=0).backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.rates[-1].append(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            self.scheduler.step()
            yield norm


def assert_pruned(model: nn.Module, run: rewound.Epochs) -> None:
    for name, kept in (run.mask or {}).items():
        weight = model.get_parameter(name)
        assert not weight[~kept.to(weight.device)].any(), name
    for name, weight in model.named_parameters():
        assert weight.ndim > 1 or weight.all(), f"{name} lies beside pruned weights and is not touched"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("technique", ["lr-rewinding", "weight-rewinding"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_weights_in_one_piece_stay_pruned_at_every_step(kind: type[nn.LSTM], technique: str, device: str) -> None:
    loop = Loop(kind, device)
    flatten(loop.model)
    run = loop.run(technique=technique)
    for epoch in run:
        for step, _ in enumerate(loop.train(epoch)):
            assert_pruned(loop.model, run)
            if step % 2:
                flatten(loop.model)  # in the middle of a level, as a loop may do at any time
            assert_pruned(loop.model, run)
    assert run.mask is not None
    assert sorted(run.mask) == sorted(name for name, weight in loop.model.named_parameters() if weight.ndim > 1)
    assert run.mask.density == pytest.approx(0.25, abs=0.01)


def test_it_trains_as_with_weights_in_pieces_of_their_own() -> None:
    flat, plain = Loop(), Loop()
    flatten(flat.model)
    for loop in (flat, plain):
        for epoch in loop.run():
            for _ in loop.train(epoch):
                pass
    for name, weight in plain.model.named_parameters():
        assert torch.equal(flat.model.get_parameter(name), weight), name


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_clipped_by_the_norm_of_what_is_left(device: str) -> None:
    loop = Loop(device=device)
    run = loop.run()
    for epoch in run:
        for norm in loop.train(epoch):
            gradients = {name: weight.grad for name, weight in loop.model.named_parameters() if weight.grad is not None}
            for name, kept in (run.mask or {}).items():
                assert not gradients[name][~kept.to(device)].any(), name
            clipped = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
            assert clipped.item() == pytest.approx(min(CLIP, norm.item()), rel=1e-3), (
                "so none of the norm was pruned weights'"
            )


def test_an_epoch_with_a_step_more_than_in_the_dense_run_repeats_its_last_rate() -> None:
    loop = Loop()
    for epoch in loop.run(retrain_epochs=1, technique="lr-rewinding"):
        for _ in loop.train(epoch):
            pass
    dense, level = loop.rates[:T], loop.rates[T:]
    assert [len(epoch) for epoch in loop.rates] == [4, 5, 4, 5]
    assert level == [dense[1][:4], dense[1]]


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = Loop()
    for epoch in whole.run(checkpoint=tmp_path / "whole"):
        for _ in whole.train(epoch):
            pass
    for stop in (1, 3, 4):  # in the dense run, in the first level and at its end
        loop = Loop()
        flatten(loop.model)
        for epoch in loop.run(checkpoint=tmp_path / f"{stop}"):
            for _ in loop.train(epoch):
                pass
            if epoch == stop:
                break
        again = Loop()
        flatten(again.model)
        for epoch in again.run(checkpoint=tmp_path / f"{stop}"):
            for _ in again.train(epoch):
                pass
        for name, weight in whole.model.named_parameters():
            assert torch.equal(again.model.get_parameter(name), weight), (stop, name)


def test_the_ticket_of_a_level_is_loaded_into_weights_in_one_piece(tmp_path: Path) -> None:
    loop = Loop()
    flatten(loop.model)
    run = loop.run(compression=2, checkpoint=tmp_path)
    for epoch in run:
        for _ in loop.train(epoch):
            pass
    other = Loop().model
    flatten(other)
    rewound.load(tmp_path / "levels" / "2.00x.safetensors").into(other)
    source, lengths = next(batches(0, "cpu"))
    assert torch.equal(other(source, lengths), loop.model(source, lengths))


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_that_became_small_has_its_weights_in_one_piece_again(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flattened: list[tuple[nn.RNNBase, int]] = []
    flatten_parameters = nn.RNNBase.flatten_parameters

    def noted(layer: nn.RNNBase) -> None:
        flattened.append((layer, layer.hidden_size))
        flatten_parameters(layer)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(WORDS, 6), nn.LSTM(6, 8, batch_first=True), First(), nn.Linear(8, 2)).to(device)
    optimizer = Adam(model.parameters(), lr=1e-2)
    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", noted)
    run = rewound.epochs(
        1,
        model,
        optimizer,
        compression=2,
        rate=0.5,
        pruner=rewound.Pruner(pattern="unit"),
        slim=True,
        say=lambda _: None,
    )
    for epoch in run:
        for source, _ in batches(epoch, device):  # on a GPU, weights in several pieces would be a warning, so an error
            optimizer.zero_grad()
            model(source).square().mean().backward()
            optimizer.step()
    lstm = model[1]
    assert isinstance(lstm, nn.LSTM)
    assert lstm.hidden_size < 8
    assert (lstm, lstm.hidden_size) in flattened


def test_no_copy_that_is_run_has_its_weights_in_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    flatten_parameters, forward = nn.LSTM.flatten_parameters, nn.LSTM.forward
    whole: list[list[int]] = []
    runs = []

    def weights(layer: nn.LSTM) -> list[int] | None:
        every = list(layer.parameters())
        return None if any(type(weight) is not nn.Parameter for weight in every) else [w.data_ptr() for w in every]

    def noted(layer: nn.LSTM) -> None:
        flatten_parameters(layer)
        if (found := weights(layer)) is not None:  # none while the network is traced
            whole.append(found)

    def run(layer: nn.LSTM, *given: Tensor) -> object:
        if (found := weights(layer)) is not None:
            runs.append(found in whole)
        return forward(layer, *given)

    monkeypatch.setattr(nn.LSTM, "flatten_parameters", noted)
    monkeypatch.setattr(nn.LSTM, "forward", run)
    model = nn.Sequential(nn.Embedding(WORDS, 6), nn.LSTM(6, 8, batch_first=True), First(), nn.Linear(8, 2))
    example = (next(batches(0, "cpu"))[0],)
    groups = rewound.units(model, example)
    small = rewound.slim(model, groups.mask_without(groups.groups[1].units[:3]), example, groups=groups)
    for network in (small.model, small.for_inference()):
        network(*example)
    assert len(runs) > 2
    assert all(runs)
