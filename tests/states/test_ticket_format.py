"""What a ticket's file may hold, and that nothing else gets through: bad files, damaged files, forged files."""

import hashlib
import json
import random
import resource
import zlib
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from test_ticket import bits_of
from torch import Tensor

from rewound import InputError, Ticket
from rewound.states.tickets.fileformat import Extent, Packed, encoded
from rewound.states.tickets.ticket import parsed

# A bit of everything: tied, empty and scalar tensors, several types, a mask that fills its bytes and one that does not.
CONTENT = Packed(
    state={
        "a.weight": Extent("F32", (3, 7)),
        "a.bias": Extent("F32", (3,)),
        "b.weight": Extent("BF16", (4, 2, 2)),
        "c.weight": "a.weight",
        "count": Extent("I64", ()),
        "flags": Extent("BOOL", (5,)),
        "none": Extent("F16", (0, 3)),
    },
    mask=["b.weight", "c.weight"],
    bits={
        "a.weight": torch.tensor([0b10010000, 0b00000001, 0b11111000], dtype=torch.uint8),
        "b.weight": torch.tensor([0b01010000, 0b00000000], dtype=torch.uint8),
    },
    values={
        "F32": torch.arange(8.0 + 3) / 3,
        "BF16": torch.tensor([0.1, -2.0], dtype=torch.bfloat16),
        "I64": torch.tensor([7]),
        "BOOL": torch.tensor([True, False, True, True, False]),
        "F16": torch.empty(0, dtype=torch.float16),
    },
    about={"recipe": "digits", "lineage": ["x", {"y": 1.5}]},
)
WHOLE = encoded(CONTENT)
BODY = 8 + int.from_bytes(WHOLE[:8], "little")


def test_that_is_a_good_one() -> None:
    ticket = parsed(WHOLE)
    assert (ticket.hash, ticket.about) == (CONTENT.hash, CONTENT.about)
    assert list(ticket.state) == list(CONTENT.state)
    assert ticket.mask.counts == {"b.weight": 2, "c.weight": 8}
    assert [round(3 * value) for value in ticket.state["c.weight"].reshape(-1).tolist()] == [
        *(0, 0, 0, 1, 0, 0, 0),
        *(0, 0, 0, 0, 0, 0, 0),
        *(0, 2, 3, 4, 5, 6, 7),
    ]
    assert ticket.state["a.bias"].tolist() == pytest.approx([8 / 3, 9 / 3, 10 / 3])
    assert ticket.state["b.weight"].reshape(-1)[:4].tolist() == pytest.approx([0, 0.1, 0, -2], rel=1e-2)
    assert ticket.state["count"].item() == 7


def changed(**fields: object) -> bytes:
    """A file with right checksums whose content contradicts itself."""
    return encoded(replace(CONTENT, **fields))


def with_place(name: str, place: object) -> bytes:
    return changed(state={**CONTENT.state, name: place})


def with_bits(name: str, *values: int) -> bytes:
    return changed(bits={**CONTENT.bits, name: torch.tensor(values, dtype=torch.uint8)})


def with_values(dtype: str, values: Tensor) -> bytes:
    return changed(values={**CONTENT.values, dtype: values})


def reheaded(change: Callable[[dict], object], data: bytes = WHOLE) -> bytes:
    """The file with a change of the header that safetensors reads."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    text = change(header) or header
    raw = text if isinstance(text, bytes) else json.dumps(text).encode()
    return len(raw).to_bytes(8, "little") + raw + data[end:]


def retold(change: Callable[[dict], object], *, seal: bool = True) -> bytes:
    """The file with a change of what its metadata says, its checksum made right again."""

    def edit(header: dict) -> None:
        said = json.loads(header["__metadata__"]["rewound"])
        said.pop("checksum")
        said = change(said) or said
        text = json.dumps(said, sort_keys=True)
        checksum = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        header["__metadata__"]["rewound"] = json.dumps({**said, "checksum": checksum if seal else "0" * 32})

    return reheaded(edit)


def with_part(name: str, raw: bytes, dtype: str = "U8", shape: list[int] | None = None) -> bytes:
    """The file with other bytes for one of its parts, or with one more."""
    header, body = json.loads(WHOLE[8:BODY]), bytearray()
    parts = {n: (e, WHOLE[BODY:][slice(*e["data_offsets"])]) for n, e in header.items() if n != "__metadata__"}
    parts[name] = ({"dtype": dtype, "shape": shape or [len(raw)]}, raw)
    for part, (entry, content) in parts.items():
        entry["data_offsets"] = [len(body), len(body) + len(content)]
        header[part] = entry
        body += content
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(body)


def without_part(name: str) -> bytes:
    return reheaded(lambda header: {n: e for n, e in header.items() if n != name}, with_part(name, b""))


BAD: dict[str, tuple[bytes, str]] = {
    "no metadata": (reheaded(lambda h: {n: e for n, e in h.items() if n != "__metadata__"}), "but no ticket"),
    "other metadata": (reheaded(lambda h: h["__metadata__"].update(rewound="{}")), "but no ticket"),
    "metadata is no JSON": (reheaded(lambda h: h["__metadata__"].update(rewound="{")), "cannot be read"),
    "metadata is a list": (reheaded(lambda h: h["__metadata__"].update(rewound="[]")), "not a table"),
    "metadata too deep": (reheaded(lambda h: h["__metadata__"].update(rewound="[" * 10**5)), "cannot be read"),
    "a name twice": (reheaded(lambda h: json.dumps(h).replace('"mask"', '"mask": 1, "mask"').encode()), ""),
    "metadata twice": (
        reheaded(lambda h: json.dumps(h).replace('"__metadata__": {', '"__metadata__": {"rewound": "",').encode()),
        "a name comes twice",
    ),
    "unknown version": (
        retold(lambda h: h.update(version=2)),
        "a ticket of version 2; this rewound knows 1, upgrade it",
    ),
    "no version": (retold(lambda h: h.pop("version") and None), "not that of a ticket"),
    "version of another kind": (retold(lambda h: h.update(version="1")), "not that of a ticket"),
    "about is a list": (retold(lambda h: h.update(about=[])), "not that of a ticket"),
    "wrong checksum": (retold(lambda h: None, seal=False), "its metadata does not match its checksum"),
    "wrong hash": (retold(lambda h: h.update(hash="0" * 32)), "its content does not match its hash"),
    "no layout": (without_part("layout"), "it has no layout"),
    "no mask": (without_part("mask"), "it has no mask"),
    "no values": (without_part("values/BF16"), "its values are not"),
    "layout of another type": (with_part("layout", zlib.compress(b"{}"), "I8"), "it has no layout"),
    "layout is empty": (with_part("layout", zlib.compress(b"{}")), "its tensors are not listed"),
    "layout is no JSON": (with_part("layout", zlib.compress(b"{'a'}")), "cannot be read"),
    "layout is no text": (with_part("layout", zlib.compress(b"\xff\xfe\x00")), "cannot be read"),
    "layout too deep": (with_part("layout", zlib.compress(b'[{"a":' * 9, 0)), "cannot be read"),
    "layout is not coded": (with_part("layout", b"{}"), "its layout cannot be decoded"),
    "layout is cut": (with_part("layout", zlib.compress(b"{}")[:-2]), "not one whole Huffman code"),
    "layout goes on": (with_part("layout", zlib.compress(b"{}") + b"x"), "not one whole Huffman code"),
    "layout explodes": (with_part("layout", zlib.compress(bytes(10**7))), "not one whole Huffman code"),
    "mask explodes": (with_part("mask", zlib.compress(bytes(10**7))), "not one whole Huffman code"),
    "state is a list": (changed(state=["a.weight"], mask=[]), "its tensors are not listed"),
    "no shape": (with_place("count", ["I64"]), "'count' does not have the type and shape of a tensor"),
    "no place": (with_place("count", None), "'count' does not have the type and shape of a tensor"),
    "negative shape": (with_place("a.bias", Extent("F32", (-3,))), "'a.bias' does not have the type and shape"),
    "fractional shape": (with_place("a.bias", Extent("F32", (3.0,))), "'a.bias' does not have"),  # type: ignore[arg-type]
    "logical shape": (with_place("count", Extent("I64", (True,))), "'count' does not have"),
    "endless shape": (with_place("none", Extent("F16", (0, 2**62, 4))), "'none' does not have"),
    "too many dimensions": (with_place("count", Extent("I64", (1,) * 65)), "'count' does not have"),
    "unknown type": (with_place("count", Extent("F4", (1,))), "'count' does not have"),
    "type of another tensor": (with_place("count", Extent("F64", ())), "its values are not"),
    "10^15 values": (with_place("a.bias", Extent("F32", (10**8, 10**7))), "its values are not"),
    "10^15 weights": (with_place("a.weight", Extent("F32", (10**8, 10**7))), "its mask has 5 bytes of bits"),
    "tied to nothing": (with_place("c.weight", "d.weight"), "tied to 'd.weight', which has no place"),
    "tied to a tied one": (with_place("d.weight", "c.weight"), "tied to 'c.weight', which has no place"),
    "tied to itself": (with_place("d.weight", "d.weight"), "tied to 'd.weight', which has no place"),
    "mask of nothing": (changed(mask=["b.weight", "d.weight"]), "not a list of its tensors"),
    "mask of no names": (changed(mask=["b.weight", 1]), "not a list of its tensors"),
    "mask is a name": (changed(mask="b.weight"), "not a list of its tensors"),
    "mask of more": (changed(mask=["b.weight", "c.weight", "a.bias"]), "its mask has 5 bytes of bits"),
    "mask of less": (changed(mask=["b.weight"]), "its mask has 5 bytes of bits"),
    "bits beyond the end": (with_bits("a.weight", 0b10010000, 0, 0b11111001), "'a.weight' goes on after its end"),
    "a bit too many": (with_bits("b.weight", 0b01010001, 0), "its values are not as many"),
    "a bit too few": (with_bits("b.weight", 0b01000000, 0), "its values are not as many"),
    "a byte too many": (with_bits("b.weight", 0b01010000, 0, 0), "its mask has 6 bytes of bits"),
    "a value too many": (with_values("BF16", torch.ones(3).bfloat16()), "its values are not as many"),
    "values of another type": (with_values("BF16", torch.ones(2).half()), "not of the types"),
    "values in a square": (with_part("values/I64", bytes(8), "I64", [1, 1]), "its values are not"),
    "values of no tensor": (with_part("values/I8", bytes(2), "I8"), "its values are not"),
    "something else": (with_part("other", bytes(2)), "its values are not"),
    "neither true nor false": (with_part("values/BOOL", bytes([1, 0, 2, 1, 0]), "BOOL"), "neither true nor false"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_one_sentence(case: str) -> None:
    data, says = BAD[case]
    with pytest.raises(InputError) as caught:
        parsed(data, "x.safetensors")
    assert says in str(caught.value)
    assert "x.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("depth", [10, 300, *range(900, 1000, 7), 3_000, 100_000])
def test_wrong_files_are_refused_however_deep_they_nest(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    about = reheaded(lambda h: h["__metadata__"].update(rewound=f'{{"hash":1,"version":1,"about":{{"x":{nested}}}}}'))
    layout = with_part("layout", zlib.compress(f'{{"state":{{"x":{nested}}}}}'.encode(), 0))
    for data in (about, layout):
        assert outcome(data) is None, "refused, and by no RecursionError"


# Fuzzing


def mutated(draw: random.Random, data: bytes) -> bytes:
    """The file with one to four accidents."""
    content = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        first = draw.choice((0, min(BODY, len(content) - 1)))
        at, end = draw.randrange(first, len(content)), draw.randrange(len(content) + 1)
        match draw.randrange(8):
            case 0:
                content[at] ^= 1 << draw.randrange(8)
            case 1:
                content[at] = draw.randrange(256)
            case 2:
                del content[draw.choice((at, 8, 0, len(content) - 1)) :]
            case 3:
                content[at:at] = content[min(at, end) : max(at, end)]
            case 4:
                del content[at : at + draw.randrange(1, 9)]
            case 5:
                content[at : at + 8] = draw.choice((0, 1, 2**31, 2**63, len(data))).to_bytes(8, "little")
            case 6:
                content[at : at + draw.randrange(9)] = draw.randbytes(draw.randrange(9))
            case 7:
                content[at:end] = data[end:at] if draw.random() < 0.5 else data[:at]
        if not content:
            return b""
    return bytes(content)


STRANGE = (
    None,
    True,
    0,
    1,
    -1,
    2,
    7,
    2**31,
    2**63,
    10**15,
    1.5,
    1e308,
    "",
    "a.weight",
    "F32",
    "U8",
    [],
    [0],
    {},
    [[3]],
)


def edited(draw: random.Random, value: object) -> object:
    """A JSON value that is like this one, but not quite."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        match draw.randrange(6):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, draw.choice(("x", "mask", "values/F32", "d.weight")): value[key]}
            case 2:
                return {**value, key: value[draw.choice(list(value))]}
            case _:
                return {**value, key: edited(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        new = draw.choice(([], [value[at], value[at]], [edited(draw, value[at])], [edited(draw, value[at])]))
        return [*value[:at], *new, *value[at + 1 :]]
    if isinstance(value, int) and draw.random() < 0.5:
        return value + draw.choice((-1, 1, 8, 64))
    return draw.choice(STRANGE)


def forged(draw: random.Random) -> bytes:
    """A file with right checksums, but another layout, other bits or other values than go together."""
    content = CONTENT
    layout = json.loads(json.dumps({"state": content.state, "mask": content.mask}))
    bits, values = dict(content.bits), dict(content.values)
    for _ in range(draw.choice((1, 1, 2, 3))):
        match draw.randrange(6):
            case 0:
                name = draw.choice(list(bits))
                bits[name] = bits[name] ^ (1 << draw.randrange(8))
            case 1:
                name = draw.choice(list(bits))
                bits[name] = bits[name].repeat(2)[: draw.randrange(7)]
            case 2:
                dtype = draw.choice(list(values))
                values[dtype] = values[dtype].repeat(2)[: draw.randrange(14)]
            case _:
                part = draw.choice(("state", "state", "mask"))
                layout[part] = edited(draw, layout[part])
    return encoded(Packed(layout["state"], layout["mask"], bits, values, content.about))


def retitled(draw: random.Random) -> bytes:
    """A file whose header is valid JSON with something changed; its checksum may be right again."""
    if draw.random() < 0.5:
        return reheaded(lambda header: edited(draw, header))
    return retold(lambda said: new if isinstance(new := edited(draw, said), dict) else said, seal=draw.random() < 0.8)


def outcome(data: bytes) -> Ticket | None:
    """A ticket that is consistent in itself, or None where the file was refused; anything else is a failure."""
    try:
        ticket = parsed(data)
    except InputError:
        return None
    for name, kept in ticket.mask.items():
        pruned = ticket.state[name].reshape(-1)[~kept.reshape(-1)]
        assert ticket.state[name].shape == kept.shape
        assert not any(bits_of(pruned))
    return ticket


def everything(ticket: Ticket) -> tuple[object, ...]:
    parts = (ticket.state, ticket.mask)
    tensors = [(name, t.dtype, t.shape, bits_of(t)) for part in parts for name, t in part.items()]
    return ticket.hash, ticket.about, tensors


@pytest.mark.parametrize("seed", range(4))
def test_four_thousand_damaged_files_are_refused_or_harmless(seed: int) -> None:
    draw, original = random.Random(seed), everything(parsed(WHOLE))
    read = [ticket for _ in range(4_000) if (ticket := outcome(mutated(draw, WHOLE))) is not None]
    assert all(everything(ticket) == original for ticket in read)
    assert len(read) < 80, "few are harmless"


def test_two_thousand_other_headers_are_refused_or_say_other_things() -> None:
    draw, (content, about, tensors) = random.Random(1), everything(parsed(WHOLE))
    read = [ticket for _ in range(2_000) if (ticket := outcome(retitled(draw))) is not None]
    assert all(everything(ticket)[0::2] == (content, tensors) for ticket in read), "the network is the same"
    assert any(ticket.about != about for ticket in read)
    assert len(read) < 1_000


def test_two_thousand_forged_files_are_refused_or_other_networks() -> None:
    draw, before = random.Random(2), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = sum(outcome(forged(draw)) is not None for _ in range(2_000))
    assert 0 < read < 1_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16, "KiB; some claim 10^15 weights"
