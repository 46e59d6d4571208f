"""A sweep's part of a store as one file (or several of a given size), to go on with on another machine.

It holds the results of the sweep, the tensors that nodes still to do will read, and drafts; the rest can be made again.
Every artifact carries its own checksum and is checked before it is merged; nothing that is there is overwritten.
"""

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rewound.errors import InputError
from rewound.planning import Plan
from rewound.remaining import todo
from rewound.store import Store


class Merged(NamedTuple):
    """What became of the artifacts of a pack."""

    added: int
    present: int
    damaged: int


def pack_store(plan: Plan, store: Store, out: Path, split_bytes: int | None = None) -> list[Path]:
    """Write what is needed to continue `plan` elsewhere; returns the files written, in order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:  # pruned weights are runs of zeros
        for path in _needed(plan, store):
            archive.add(path, str(path.relative_to(store.root)))
    content = buffer.getvalue()
    out.parent.mkdir(parents=True, exist_ok=True)
    if split_bytes is None:
        out.write_bytes(content)
        return [out]
    pieces = [content[start : start + split_bytes] for start in range(0, len(content), split_bytes)]
    digits = max(3, len(str(len(pieces))))  # as many in each, so that their names sort in order
    paths = [out.with_name(f"{out.name}.{number:0{digits}d}") for number in range(len(pieces))]
    for path, piece in zip(paths, pieces, strict=True):
        path.write_bytes(piece)
    return paths


def _needed(plan: Plan, store: Store) -> Iterator[Path]:
    open_nodes = {node.key for node in todo(plan, store)}
    for node in plan.nodes:
        read_later = not open_nodes.isdisjoint(plan.readers.get(node.key, ()))
        artifacts = store.artifacts(node.key)
        yield from (
            path for path in artifacts if path.parts[-3] == "results" or path.parts[-2] == "drafts" or read_later
        )


def unpack_store(paths: Sequence[Path], store: Store) -> Merged:
    """Merge packs into a store: the pieces of one pack together, in any order."""
    content = b"".join(path.read_bytes() for path in sorted(paths))
    counts = {"added": 0, "present": 0, "damaged": 0}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isfile() else None
                if file is not None:
                    counts[store.merge(member.name, file.read())] += 1
    except InputError:  # what the store says
        raise
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        names = ", ".join(path.name for path in paths)
        raise InputError(f"cannot read pack {names}: {error}; give all pieces of one pack, unchanged") from error
    return Merged(**counts)
