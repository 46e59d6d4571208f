"""Prune an LSTM that translates, in a loop of your own: two lines change. Run: python examples/lstm_translation.py

An encoder and a decoder with attention learn to translate made-up sentences: in German the verb comes last after
"weil", and "der" becomes "den" in an object. A batch has sentences of about the same length, gradients are clipped, and
Adam's learning rate warms up and is halved three times; each level goes through that schedule again. Kill the script
and run it again: it goes on where it was.
"""

import random
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import rewound

EPOCHS, BATCH, UNITS = 8, 32, 32
PAD, START, END = 0, 1, 2
NOUNS = [("man", "der Mann"), ("dog", "der Hund"), ("woman", "die Frau"), ("cat", "die Katze"), ("child", "das Kind")]
VERBS = [("sees", "sieht"), ("hears", "hört"), ("finds", "findet"), ("needs", "braucht"), ("likes", "mag")]
ADJECTIVES = [("", ""), ("old", "alte"), ("small", "kleine"), ("good", "gute")]


def phrase(dice: random.Random, is_object: bool = False) -> tuple[str, str]:
    (noun, german), (old, alte) = dice.choice(NOUNS), dice.choice(ADJECTIVES)
    article, name = german.split()
    if is_object and article == "der":
        article, alte = "den", alte and alte + "n"
    return f"the {old} {noun}", f"{article} {alte} {name}"


def sentence(dice: random.Random) -> tuple[str, str]:
    """As "the dog sees the old man because ..." and "der Hund sieht den alten Mann weil ..."."""
    english, german = [], []
    for because, weil in [("", ""), ("because", "weil")][: dice.choice([1, 2])]:
        (who, wer), (sees, sieht), (whom, wen) = phrase(dice), dice.choice(VERBS), phrase(dice, is_object=True)
        english += [because, who, sees, whom]
        german += [weil, wer, wen, sieht] if weil else [wer, sieht, wen]
    return " ".join(english), " ".join(german)


def numbers(sentences: list[str]) -> dict[str, int]:
    return {word: number for number, word in enumerate(sorted(set(" ".join(sentences).split())), start=END + 1)}


class Translator(nn.Module):
    def __init__(self, source_words: int, target_words: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(source_words, UNITS), nn.Embedding(target_words, UNITS)
        self.encoder = nn.LSTM(UNITS, UNITS, batch_first=True)
        self.decoder = nn.LSTM(UNITS, UNITS, batch_first=True)
        self.scores = nn.Linear(2 * UNITS, target_words)

    def read(self, source: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        lengths = (source != PAD).sum(1).cpu()
        words = pack_padded_sequence(self.source(source), lengths, batch_first=True, enforce_sorted=False)
        memory, state = self.encoder(words)
        return pad_packed_sequence(memory, batch_first=True)[0], state

    def write(
        self, words: Tensor, state: tuple[Tensor, Tensor], memory: Tensor, source: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs, state = self.decoder(self.target(words), state)
        attention = (outputs @ memory.mT).masked_fill(source[:, None] == PAD, -torch.inf).softmax(-1)
        return self.scores(torch.cat([outputs, attention @ memory], -1)), state

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.read(source)
        return self.write(target, state, memory, source)[0]


dice = random.Random(0)
text = list(dict.fromkeys(sentence(dice) for _ in range(900)))  # none of them twice
english, german = numbers([source for source, _ in text]), numbers([target for _, target in text])
pairs = [
    (
        torch.tensor([english[word] for word in source.split()]),
        torch.tensor([START, *(german[word] for word in target.split()), END]),
    )
    for source, target in text
]
train, held_out = pairs[:700], pairs[700:]
BATCHES = -(-len(train) // BATCH)


def batch(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return pad_sequence([pair[0] for pair in pairs], True, PAD), pad_sequence([pair[1] for pair in pairs], True, PAD)


def epoch() -> Iterator[tuple[Tensor, Tensor]]:
    """All sentences once, in batches of about the same length, in random order."""
    order = sorted(torch.randperm(len(train)).tolist(), key=lambda number: len(train[number][0]))
    for first in (BATCH * torch.randperm(BATCHES)).tolist():
        yield batch([train[number] for number in order[first : first + BATCH]])


torch.manual_seed(0)
model = Translator(END + 1 + len(english), END + 1 + len(german))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=BATCHES)
halvings = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5 * BATCHES, 6 * BATCHES, 7 * BATCHES], gamma=0.5)
scheduler = torch.optim.lr_scheduler.ChainedScheduler([warm_up, halvings])


@torch.no_grad()
def accuracy() -> float:
    """The share of held-out sentences that are translated without a mistake, the likeliest word first each time."""
    source, target = batch(held_out)
    memory, state = model.read(source)
    words, is_right = target[:, :1], torch.ones(len(source), dtype=torch.bool)
    for wanted in target[:, 1:].T:
        scores, state = model.write(words, state, memory, source)
        words = scores.argmax(-1)
        is_right &= (words[:, 0] == wanted) | (wanted == PAD)
    return is_right.double().mean().item()


run = rewound.epochs(EPOCHS, model, optimizer, scheduler, compression=8, rate=0.5, checkpoint="lstm-run")  # new
for _ in run:  # was: for _ in range(EPOCHS)
    for source, target in epoch():
        optimizer.zero_grad()
        scores = model(source, target[:, :-1])
        nn.functional.cross_entropy(scores.mT, target[:, 1:], ignore_index=PAD).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        scheduler.step()
    run.report(accuracy())

for level in run.levels:
    smaller = f"{level.compression:.2f}x smaller ({level.network_compression:.2f}x of the whole network)"
    print(f"{smaller}: {level.value:.1%} of the sentences translated without a mistake")
assert run.mask is not None
rewound.save(model, run.mask, "lstm.safetensors")
