"""Damage to a folder of checkpoints is found out: no flipped bit, no swapped file gives another network in silence."""

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch

import rewound.loops.iteration
from rewound import InputError
from sameness import assert_same
from training_loops import Loop, T, made_by_the_version_before, network


@pytest.fixture(autouse=True)
def _save_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewound.loops.iteration, "SAVE_SECONDS", 0.0)


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def goes_on(folder: Path, **options: object) -> Loop:
    loop = Loop(network(seed=7))
    loop.over(loop.run(**{"compression": 2, "checkpoint": folder, **options}))
    return loop


def left(folder: Path, until: int | None = T + 6, seed: int = 0, **options: object) -> Loop:
    loop = Loop(network(seed))
    loop.over(loop.run(**{"compression": 2, "checkpoint": folder, **options}), until=until)
    return loop


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_flipped_bit_and_no_swapped_file_gives_another_network_in_silence(bit_flips: ModuleType) -> None:
    counts = Counter(came for came, _, _ in bit_flips.outcomes(bit_flips.KINDS["loop"], 30, seed=1))
    assert set(counts) <= {"identical", "identical, told", "refused"}
    assert counts["identical, told"] > 0 < counts["refused"]


def test_one_bit_of_one_weight_is_found_out(tmp_path: Path) -> None:
    whole = Loop()
    whole.over(whole.run(compression=2))
    left(tmp_path)
    data = (latest := tmp_path / "latest.pt").read_bytes()
    weight = torch.load(latest, weights_only=True)["model"]["0.weight"].numpy().tobytes()
    flip(latest, data.index(weight) + 3)
    resumed = goes_on(tmp_path)
    assert resumed.said[0].startswith(f"cannot read {latest}: it is damaged; set aside as {tmp_path / 'damaged'}")
    assert_same(resumed.model.state_dict(), whole.model.state_dict())


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.made),)


def test_a_snapshot_can_call_nothing(tmp_path: Path) -> None:
    left(folder := tmp_path / "run")
    content = torch.load(latest := folder / "latest.pt", weights_only=True)
    torch.save({**content, "also": [Evil(tmp_path / "made")]}, latest)
    assert goes_on(folder).said[0].startswith(f"cannot read {latest}: it is damaged; set aside")
    assert not (tmp_path / "made").exists()


def test_damage_to_what_the_next_level_goes_back_to_is_told_before_it_is_trained(tmp_path: Path) -> None:
    options = {"technique": "weight-rewinding", "retrain_epochs": 2}
    left(tmp_path, T + 1, **options)
    flip(rewind := tmp_path / "rewind-0003.pt", 1000)
    said = rf"cannot read {rewind}: it is damaged, and the next level goes back to it; train anew in another folder$"
    with pytest.raises(InputError, match=said):
        goes_on(tmp_path, **options)
    rewind.unlink()
    with pytest.raises(InputError, match="holds no weights of epoch 3 to rewind to; train anew in another folder"):
        goes_on(tmp_path, **options)


def test_files_that_changed_places_are_told(tmp_path: Path) -> None:
    left(tmp_path)
    first, last = (tmp_path / name for name in ("level-00.pt", "level-01.pt"))
    held = first.read_bytes()
    first.write_bytes(last.read_bytes())
    last.write_bytes(held)
    said = rf"{last} is the snapshot that was written as level-00.pt; give the files their names back, or remove it"
    (tmp_path / "latest.pt").unlink()
    with pytest.raises(InputError, match=said):
        goes_on(tmp_path)


def test_a_file_of_another_run_is_told(tmp_path: Path) -> None:
    for number, name in enumerate(("one", "two")):
        left(tmp_path / name, seed=number)
    shutil.copy(tmp_path / "two" / "latest.pt", tmp_path / "one")
    with pytest.raises(InputError, match=r"one/latest\.pt is a snapshot of another run; put back the one of this run"):
        goes_on(tmp_path / "one")
    (tmp_path / "one" / "latest.pt").unlink()
    assert goes_on(tmp_path / "one").seen[0][0] == 2 * T


def test_a_trainers_checkpoint_does_not_go_back_to_the_weights_of_another_run(tmp_path: Path) -> None:
    options = {"technique": "weight-rewinding", "retrain_epochs": 2, "resume": False}
    states = []
    for seed in (0, 1):  # the second is begun anew in the same folder
        loop = Loop(network(seed))
        run = loop.run(compression=2, checkpoint=tmp_path, **options)
        loop.over(run, until=T)
        states.append(run.state_dict())
    other, same_run = Loop(), Loop()
    other_run = other.run(compression=2, checkpoint=tmp_path, **options)
    other_run.load_state_dict(states[0])
    with pytest.raises(InputError, match=r"rewind-0003\.pt is a snapshot of another run"):
        next(iter(other_run))
    run = same_run.run(compression=2, checkpoint=tmp_path, **options)
    run.load_state_dict(states[1])
    assert next(iter(run)) == T + 1


@pytest.mark.parametrize("digit", ["rate", "checksum", "version", "run"])
def test_damage_to_the_arguments_is_told_as_such(digit: str, tmp_path: Path) -> None:
    left(tmp_path)
    text = (file := tmp_path / "arguments.json").read_text()
    flip(file, text.index(":", text.index(f'"{digit}"')) + 3)
    with pytest.raises(InputError, match=r"arguments\.json: it is damaged; .* remove this file|another version of re"):
        goes_on(tmp_path)
    file.unlink()
    assert goes_on(tmp_path).seen[0][0] == T + 6, "what the remedy says, goes on"
    assert json.loads(file.read_text())["run"] == json.loads(text)["run"]


def test_a_folder_of_the_version_before_goes_on_and_its_files_are_told_of_once(tmp_path: Path) -> None:
    whole = Loop()
    options = {"technique": "weight-rewinding", "retrain_epochs": 3}
    whole.over(whole.run(compression=2, **options))
    left(tmp_path, T + 4, **options)
    made_by_the_version_before(tmp_path)
    first, second = Loop(), Loop()
    first.over(first.run(compression=2, checkpoint=tmp_path, **options), until=T + 5)
    told = [line for line in first.said if "without a checksum" in line]
    assert told == [
        "written by an earlier version, without a checksum: latest.pt, level-00.pt, level-01.pt, rewind-0002.pt in "
        f"{tmp_path}; they are used as they are"
    ]
    second.over(second.run(compression=2, checkpoint=tmp_path, **options))
    assert not any("checksum" in line for line in second.said)
    assert_same(second.model.state_dict(), whole.model.state_dict())
    assert first.seen[0][0] == T + 4
    assert second.seen[0][0] == T + 5


def test_a_file_without_a_checksum_does_not_get_among_others(tmp_path: Path) -> None:
    left(tmp_path)
    torch.save(torch.load(latest := tmp_path / "latest.pt", weights_only=True), latest)
    assert goes_on(tmp_path).said[0].startswith(f"cannot read {latest}: it is damaged; set aside")


def replaced(content: object, path: list[str], value: object) -> object:
    if not path:
        return value
    assert isinstance(content, dict)
    return {**content, path[0]: replaced(content.get(path[0]), path[1:], value)}


WRONG = [
    ([], [1, 2]),
    (["model"], [1]),
    (["optimizer"], 3),
    (["optimizer", "param_groups"], {"a": 1}),
    (["schedulers"], {"a": 1}),
    (["schedulers"], [1]),
    (["also"], None),
    (["random"], []),
    (["progress"], [1]),
    (["progress"], {}),
    (["progress", "level"], "one"),
    (["progress", "level"], 7),
    (["progress", "done"], -1),
    (["progress", "densities"], {"a": 1}),
    (["progress", "densities"], ["x"]),
    (["progress", "mask"], [1]),
    (["progress", "mask"], {"bits": {"0.weight": 1}, "shapes": {"0.weight": (16, 6)}}),
    (["progress", "mask"], None),
    (["progress", "recording"], []),
    (["progress", "recording"], {"epochs": 5, "groups": {"a": 1}}),
    (["progress", "recording"], {"epochs": 5, "groups": [{"lr": [[(0.1, "three")]]}]}),
    (["progress", "reached"], {"a": 1}),
    (["progress", "reached"], [(1, 2)]),
    (["progress", "run"], 5),
    (["random"], [{"python": 1}]),
]


@pytest.fixture(scope="module")
def a_left_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("left") / "run"
    loop = Loop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewound.loops.iteration, "SAVE_SECONDS", 0.0)
        loop.over(loop.run(compression=2, checkpoint=folder), until=T + 6)
    made_by_the_version_before(folder)
    return folder


@pytest.mark.parametrize(("path", "value"), WRONG, ids=[f"{'-'.join(p)}={v}"[:40] for p, v in WRONG])
def test_content_of_another_shape_is_one_sentence(
    path: list[str], value: object, a_left_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(a_left_folder, folder)
    content = torch.load(folder / "latest.pt", weights_only=True)
    torch.save(replaced(content, path, value), folder / "latest.pt")
    with pytest.raises(InputError) as error:
        goes_on(folder)
    assert str(error.value).count("\n") == 0
    assert "give " in str(error.value)


@pytest.mark.parametrize(("path", "value"), [(p[1:], v) for p, v in WRONG if p and p[0] == "progress"])
def test_a_trainers_state_of_another_shape_is_one_sentence(path: list[str], value: object) -> None:
    loop = Loop()
    run = loop.over(loop.run(compression=2, resume=False), until=T + 1)
    state = replaced(run.state_dict(), path, value)
    again = Loop().run(compression=2, resume=False)
    with pytest.raises(InputError, match=r"^this is no state of a run: .*; load what run\.state_dict\(\) gave$"):
        again.load_state_dict(state)  # type: ignore[arg-type]


def test_random_damage_is_a_sentence_or_goes_on(a_left_folder: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    data = (a_left_folder / "latest.pt").read_bytes()
    for number in range(20):
        shutil.copytree(a_left_folder, folder := tmp_path / str(number))
        damaged = bytearray(data)
        for _ in range(20):
            damaged[draw.randrange(len(data) - 2000, len(data))] = draw.randrange(256)
        (folder / "latest.pt").write_bytes(damaged)
        with suppress(InputError):
            assert 0 < Loop().run(compression=2, checkpoint=folder).epochs_done <= T + 6
