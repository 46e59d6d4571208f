"""Small networks of many kinds, each with an example: what units and slim networks are tried on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rewound.tasks.recipes.resnet import ResNet

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
IMAGES = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8).sin()
IDS = torch.arange(14).reshape(2, 7) % 11


def residual() -> Case:
    return ResNet((2, 1), (4, 6), generator=torch.Generator().manual_seed(0)), (IMAGES,), {}


def plain() -> Case:
    features = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3)]
    return (
        nn.Sequential(*features, nn.ReLU(), nn.Flatten(), nn.Linear(24, 10), nn.GELU(), nn.Linear(10, 4)),
        (IMAGES,),
        {},
    )


class Dense(nn.Module):
    """Concatenation, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(13, 5, 1)
        self.grow = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(4 + 3 * i), nn.ReLU(), nn.Conv2d(4 + 3 * i, 3, 3, padding=1)) for i in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.grow:
            x = torch.cat([x, layer(x)], 1)
        return self.head(x)


class Inverted(nn.Module):
    """Depthwise convolutions with squeeze and excitation, as in MobileNetV3."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.expand, self.depth = (
            nn.Conv2d(3, 4, 1),
            nn.Conv2d(4, 8, 1),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
        )
        self.norm, self.down, self.up = nn.BatchNorm2d(8), nn.Conv2d(8, 3, 1), nn.Conv2d(3, 8, 1)
        self.project, self.head = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.hardswish(self.norm(self.depth(F.hardswish(self.expand(x)))))
        y = y * torch.sigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(y, 1)))))
        return self.head(x + self.project(y))


class Shuffled(nn.Module):
    """Grouped convolutions and a channel shuffle, as in ShuffleNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped, self.last = (
            nn.Conv2d(3, 8, 1),
            nn.Conv2d(8, 12, 3, padding=1, groups=2),
            nn.Conv2d(12, 5, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.grouped(self.first(x)))
        n, c, h, w = x.shape
        return self.last(x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w))


class UNet(nn.Module):
    """Down, up by a transposed convolution, and a connection across."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.up, self.last = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 6, 3, 2, 1),
            nn.ConvTranspose2d(6, 5, 2, 2),
            nn.Conv2d(9, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.last(torch.cat([x, self.up(F.relu(self.down(x)))], 1))


class SuperResolution(nn.Module):
    """A pixel shuffle: four channels become one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(5, 12, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(F.pixel_shuffle(self.wide(F.relu(self.first(x))), 2)))


class Gated(nn.Module):
    """A gated linear unit behind group normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.gate, self.last = (
            nn.Conv2d(3, 8, 1),
            nn.GroupNorm(4, 8),
            nn.Conv2d(8, 10, 1),
            nn.Conv2d(5, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.gate(F.relu(self.norm(self.first(x)))).chunk(2, 1)
        return self.last(a * torch.sigmoid(b))


class FrozenNorm(nn.Module):
    """A BatchNorm that is not trained: its numbers are buffers, as in detectors."""

    def __init__(self, size: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 0.1).rsqrt()
        return x * scale.view(1, -1, 1, 1) + (self.bias - self.running_mean * scale).view(1, -1, 1, 1)


class Frozen(nn.Module):
    """A residual network whose normalisation is frozen, and a number for each channel beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), FrozenNorm(outputs))
            for inputs, outputs in ((3, 4), (4, 6), (6, 4))
        )
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4).view(4, 1, 1), persistent=False)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (self.scale * x + self.second(self.first(x).sigmoid())).relu()
        found: Tensor = self.head(x.mean((2, 3)))
        return found


class Halved(nn.Module):
    """`glu` behind instance normalisation, and a selection of places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.normalise = nn.Conv2d(3, 10, 1), nn.InstanceNorm2d(10, affine=True, track_running_stats=True)
        self.second, self.last = nn.Conv2d(5, 4, 1), nn.Conv2d(4, 2, 1)
        self.register_buffer("places", torch.tensor([0, 2, 3]))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.glu(self.normalise(self.first(x)), 1)
        found: Tensor = self.last(self.second(x).relu().index_select(2, self.places)).mean((2, 3))
        return found


class Tagger(nn.Module):
    """A recurrent network that labels each word: two layers, in both directions."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(11, 6), kind(6, 5, 2, batch_first=True, **options)
        self.label = nn.Linear((options.get("proj_size") or 5) * (1 + self.layers.bidirectional), 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.label(self.layers(self.words(ids))[0])


class Experts(nn.Module):
    """Attention with normalised heads that share keys and values, and may look away; then experts: one acts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(11, 12), nn.Linear(12, 11)
        self.q, self.kv, self.out = nn.Linear(12, 16), nn.Linear(12, 16), nn.Linear(16, 12)
        self.of_q, self.of_k, self.away = (nn.Parameter(torch.ones(size)) for size in (4, 4, 4))
        self.router = nn.Linear(12, 3)
        self.up, self.down = nn.Parameter(torch.randn(3, 5, 12)), nn.Parameter(torch.randn(3, 12, 5))

    def attended(self, x: Tensor) -> Tensor:
        q, (k, v) = self.q(x).unflatten(2, (-1, 4)), self.kv(x).unflatten(2, (2, -1, 4)).unbind(2)
        q, k = (y * (y.square().mean(-1, True) + 1e-3).rsqrt() * w for y, w in ((q, self.of_q), (k, self.of_k)))
        k, v = (y.repeat_interleave(2, 2) for y in (k, v))
        scores = torch.cat(
            [q.transpose(1, 2) @ k.permute(0, 2, 3, 1), self.away.view(1, -1, 1, 1).expand(2, -1, 7, 1)], -1
        )
        scores = (scores - scores.max(-1, keepdim=True).values).softmax(-1)[..., :-1]
        return self.out((scores @ v.transpose(1, 2)).transpose(1, 2).flatten(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = (x + self.attended(x)).flatten(0, 1)
        chosen = self.router(x).argmax(-1)
        hidden = torch.bmm(self.up[chosen], x[..., None]).relu()
        return self.last(x + torch.bmm(self.down.index_select(0, chosen), hidden)[..., 0])


class Translator(nn.Module):
    """The last state of one recurrent network is the first of another, which is a cell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.reader, self.writer = nn.Embedding(11, 6), nn.GRU(6, 5, batch_first=True), nn.GRUCell(6, 5)
        self.label = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        state = self.reader(words)[1][0]
        for place in range(3):
            state = self.writer(words[:, place], state)
        return self.label(state)


EDGES = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])


class Graph(nn.Module):
    """A network of messages between the nodes of a graph, which are added up where they arrive."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.message, self.next = nn.Linear(6, 8), nn.Linear(16, 10), nn.Linear(18, 8)
        self.last, self.how = nn.Linear(8, 3), how

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        hidden, (source, target) = self.first(nodes).relu(), edges
        messages = self.message(torch.cat([hidden[source], hidden[target]], -1)).relu()
        arrived, places = messages.new_zeros(len(nodes), messages.shape[1]), target[:, None].expand_as(messages)
        if self.how == "index":
            arrived.index_add_(0, target, messages)
        elif self.how == "sum":
            arrived = arrived.scatter_add(0, places, messages)
        else:
            arrived = arrived.scatter_reduce(0, places, messages, self.how, include_self=False)
        return self.last(hidden + self.next(torch.cat([hidden, arrived], -1)).relu())


class Scanned(nn.Module):
    """Sums over the steps of a sequence, and products with an ellipsis."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.decay = nn.Parameter(torch.randn(8, 6)), nn.Linear(6, 8)
        self.second, self.last = nn.Parameter(torch.randn(7, 8)), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.decay(x).sigmoid().cumsum(1)
        hidden = torch.einsum("...i,hi->...h", x, self.first).cumsum(1) * (-steps).exp()
        return self.last(torch.einsum("oh,...h->...o", self.second, hidden).relu())


def graph(how: str) -> Callable[[], Case]:
    return lambda: (Graph(how), (torch.linspace(-1, 1, 30).reshape(5, 6).sin(), EDGES), {})


def tagger(kind: type[nn.RNNBase], **options: Any) -> Callable[[], Case]:
    return lambda: (Tagger(kind, **options), (IDS,), {})


def of(module: Callable[[], nn.Module]) -> Callable[[], Case]:
    return lambda: (module(), (IMAGES,), {})


def bert() -> Case:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20}
    return BertModel(BertConfig(**sizes, vocab_size=11), add_pooling_layer=False), (IDS,), {}


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=12, n_layer=1, n_head=3, n_positions=8, vocab_size=11, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config), (), {"input_ids": IDS, "use_cache": False}


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    return (
        LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=20, vocab_size=11)),
        (),
        {"input_ids": IDS, "use_cache": False},
    )


def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 10}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4)), (IMAGES,), {}


ARCHITECTURES: dict[str, Callable[[], Case]] = {
    "residual": residual,
    "plain": plain,
    "concatenated": of(Dense),
    "depthwise": of(Inverted),
    "shuffled": of(Shuffled),
    "u-net": of(UNet),
    "pixel-shuffle": of(SuperResolution),
    "gated": of(Gated),
    "halved": of(Halved),
    "frozen": of(Frozen),
    "lstm": tagger(nn.LSTM),
    "bilstm": tagger(nn.LSTM, bidirectional=True),
    "projected-lstm": tagger(nn.LSTM, bidirectional=True, proj_size=3),
    "gru": tagger(nn.GRU, bidirectional=True),
    "rnn": tagger(nn.RNN, bias=False, nonlinearity="relu"),
    "translator": lambda: (Translator(), (IDS,), {}),
    "graph of sums": graph("sum"),
    "graph of indices": graph("index"),
    "graph of means": graph("mean"),
    "graph of maxima": graph("amax"),
    "scanned": lambda: (Scanned(), (torch.linspace(-1, 1, 60).reshape(2, 5, 6).sin(),), {}),
    "experts": lambda: (Experts(), (IDS,), {}),
    "bert": bert,
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
}
