"""A worker of several processes, which train one network together: the first leads, and the others follow.

The leader is the worker: it finds nodes, claims them, keeps drafts, evaluates and publishes. A follower has no store
and no plan. For each run the leader gives all followers the same recipe, state, mask and rates, and every process then
calls `train` with its part of the batches (`parallel`). The leader starts its followers, one for each further GPU, or
`torchrun` has started all of them.

A follower that dies or fails ends the run with an error in the leader; the next command goes on from the last draft.
Followers end with their leader, also with one that fails or finds nothing to do before it has met them.
"""

import functools
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from rewound.experiments.plans.options import Options, Paused
from rewound.foundations.errors import Diverged, Failed, InputError, error_from, error_words
from rewound.foundations.owners import interrupts_held, script_hidden, torch_log_held
from rewound.method.pruning.mask import Mask
from rewound.method.schedule import Segment
from rewound.tasks import ranks
from rewound.tasks.devices import device_kind
from rewound.tasks.parallel import Abandoned
from rewound.tasks.recipe import Recipe
from rewound.tasks.resident import Share
from rewound.tasks.training import State, Training, never, train

_Store: TypeAlias = Any  # torch.distributed.Store, of which torch's types know nothing
_LOOK = 0.05  # seconds between looks for the next run
_PATIENCE = timedelta(minutes=30)  # for the others at one step: the leader may be uploading a draft
_GRACE = 10.0  # seconds to end, or to say why one has failed
_OF_OTHERS = re.compile("gloo|nccl|connection|socket|peer|timed out|timeout", re.IGNORECASE)  # in words of torch


class _Run(NamedTuple):
    """What the leader gives its followers."""

    recipe: Recipe
    state: State
    mask: Mask | None
    lr: Sequence[Segment]
    stops: Collection[int]


def check_processes(options: Options) -> None:
    """An error unless this machine has what the processes of one worker need."""
    count = options.gpus_per_run
    if count == 1:
        return
    if not dist.is_available():
        raise InputError(f"{count} GPUs per run need torch.distributed, which this torch does not have; give 1")
    if (by_torchrun := launched()) is not None and by_torchrun.of != count:
        raise InputError(
            f"{count} GPUs per run contradict the {by_torchrun.of} processes that torchrun has started (WORLD_SIZE); "
            f"start {count} by torchrun, or leave it out"
        )
    if dist.is_initialized():
        raise InputError(
            f"{count} GPUs per run need a process that has no process group of torch.distributed yet, and this one "
            "has; call rewound.run before init_process_group, or in a process of its own"
        )
    if device_kind(options.device) == "cuda":
        if torch.device(options.device).index is not None:
            raise InputError(
                f"{count} GPUs per run take the first {count} that the process sees, so device must be cuda, not "
                f"{options.device}; set CUDA_VISIBLE_DEVICES to choose"
            )
        here = count if by_torchrun is None else int(os.environ.get("LOCAL_WORLD_SIZE", count))
        if (there := torch.cuda.device_count()) < here:
            raise InputError(
                f"{here} GPUs per run are more than the {there} that torch sees here; give at most {there}"
            )


def launched() -> Share | None:
    """Which of how many processes this is, if torchrun, or a launcher with the same variables, has started several."""
    try:
        share = Share(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    except (KeyError, ValueError):
        return None
    return share if share.of > 1 else None


@contextmanager
def leading(options: Options) -> Iterator[Training]:
    """Inside, `train` as a worker with these options calls it: alone, or with followers, which end here."""
    if options.gpus_per_run == 1:
        yield train
        return
    check_processes(options)
    with tempfile.TemporaryDirectory(prefix="rewound-") as folder:
        leader = Leader(options, Path(folder))
        patience = 1.0  # for followers of a leader that has failed
        try:
            leader.meet()
            yield leader.train
            patience = _GRACE
        except Paused:
            patience = _GRACE
            raise
        finally:
            leader.close(patience)


@contextmanager
def leading_launched(options: Options) -> Iterator[None]:
    """Inside, this process leads those that torchrun has started; at the end they end, even if it never met them."""
    if options.gpus_per_run == 1 or (share := launched()) is None:
        yield
        return
    check_processes(options)
    store = _launchers_store()
    patience = 1.0
    try:
        yield
        patience = _GRACE
    finally:
        until = time.monotonic() + patience
        with suppress(RuntimeError):  # where torchrun is gone, and the store with it
            store.set("end", "")
            while not store.check([f"left {rank}" for rank in range(1, share.of)]) and time.monotonic() < until:
                time.sleep(_LOOK)  # the store may end with this process


class Leader:
    """The first process of a worker, and the others as it sees them."""

    def __init__(self, options: Options, folder: Path) -> None:
        self._count, self._device = options.gpus_per_run, options.device
        self._followers: list[BaseProcess] = []
        self._calls, self._states, self._is_closing = 0, iter(list[State]()), False
        if launched() is not None:
            self._store = _launchers_store()
            return
        self._store = dist.FileStore(str(folder / "store"), self._count)  # type: ignore[attr-defined]
        context = multiprocessing.get_context("spawn")
        with interrupts_held(), script_hidden(), torch_log_held():
            for rank in range(1, self._count):
                given = (str(folder / "store"), Share(rank, self._count), self._device, os.getpid())
                self._followers.append(context.Process(target=_be_follower, args=given, daemon=True))
                self._followers[-1].start()

    def meet(self) -> None:
        """Wait until the followers are there, and join them."""
        waiting = {f"ready {rank}" for rank in range(1, self._count)}
        while waiting:
            waiting = {key for key in waiting if not self._store.check([key])}
            self._check_alive()
            time.sleep(_LOOK)
        self._call()
        _join(self._store, Share(0, self._count), self._device, on_this_machine=bool(self._followers))
        if self._followers and device_kind(self._device) == "cuda":
            threading.Thread(target=self._watch, daemon=True).start()

    def train(
        self,
        recipe: Recipe,
        state: State,
        mask: Mask | None = None,
        *,
        lr: Sequence[Segment],
        stops: Collection[int] = (),
        due: Callable[[], bool] = never,
        device: torch.device | str = "cpu",
    ) -> Iterator[State]:
        """`training.train`, by all processes of this worker."""
        self._states = self._led(_Run(recipe, _on_cpu(state), mask, list(lr), list(stops)), due, torch.device(device))
        return self._states

    def _led(self, run: _Run, due: Callable[[], bool], device: torch.device) -> Iterator[State]:
        try:
            self._check_alive()
            self._call()
            ranks.from_first(run)
            recipe, state, mask, lr, stops = run
            yield from train(
                recipe, state, mask, lr=lr, stops=stops, due=due, device=device, processes=dist.group.WORLD
            )
        except RuntimeError as error:
            if not isinstance(error, Failed) and _OF_OTHERS.search(str(error)):
                raise self._reason(error) from error
            raise

    def _call(self) -> None:
        """Let the followers begin what comes next: the first time they join, then each time they take part in a run."""
        self._store.set(f"call {self._calls}", "")
        self._calls += 1

    def _check_alive(self) -> None:
        if any(follower.exitcode is not None for follower in self._followers):
            raise self._reason(None)

    def _reason(self, error: Exception | None) -> Exception:
        """What a follower has said when it failed, or how it died, as soon as that is known."""
        end, others = time.monotonic() + _GRACE, f"the {self._count} that train a network together"
        while time.monotonic() < end:
            codes = {rank: each.exitcode for rank, each in enumerate(self._followers, 1) if each.exitcode}
            for rank, code in codes.items():
                if code < 0:
                    return Failed(f"process {rank} of {others} died (signal {-code}); {_REMEDY}")
            for rank in range(1, self._count):
                with suppress(RuntimeError):  # where the store is gone, too
                    if self._store.check([f"failed {rank}"]):
                        return error_from(json.loads(self._store.get(f"failed {rank}")))
            for rank, code in codes.items():  # it has said nothing before
                return Failed(f"process {rank} of {others} ended (exit code {code}); {_REMEDY}")
            time.sleep(_LOOK)
        why = f" ({' '.join(str(error).split())[:200]})" if error else ""
        return Failed(f"one of {others} does not answer{why}; {_REMEDY}")

    def _watch(self) -> None:
        """Free the leader from waiting on its GPU for a follower that has died."""
        wait([follower.sentinel for follower in self._followers])
        if not self._is_closing:
            with suppress(Exception):  # the leader's own error says the rest
                dist.distributed_c10d._abort_process_group()

    def close(self, patience: float) -> None:
        """Let the followers end, in so many seconds, and leave the group."""
        self._is_closing = True
        with suppress(Exception):  # an error on the way here is the one to raise
            self._states.close()  # type: ignore[attr-defined]  # lets followers go that wait in its middle
            self._store.set("end", "")
        until = time.monotonic() + patience
        for follower in self._followers:
            follower.join(max(0.0, until - time.monotonic()))
            if follower.is_alive():
                follower.kill()
            follower.join()
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()


_REMEDY = "nothing finished is lost, and the same command goes on from the last draft"


def _on_cpu(state: State) -> State:
    parts = [{name: tensor.detach().cpu() for name, tensor in part.items()} for part in (state.model, state.slots)]
    return State(parts[0], parts[1], state.seed, state.position)


def _join(store: _Store, share: Share, device: str, *, on_this_machine: bool) -> None:
    """Make the processes a group of torch.distributed."""
    is_gpu = device_kind(device) == "cuda"
    if is_gpu:
        torch.cuda.set_device(_gpu_of(share))
        torch.backends.cudnn.allow_tf32 = False  # as `device_named` has it
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    if on_this_machine and before is None and sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # nobody else is to connect
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_gpu else "gloo",
            store=store,
            rank=share.number,
            world_size=share.of,
            timeout=_PATIENCE,
        )
    finally:
        if before is None:
            os.environ.pop("GLOO_SOCKET_IFNAME", None)


@functools.cache  # a second one would wait for the others again
def _launchers_store() -> _Store:
    """Where the processes that torchrun has started meet."""
    from torch.distributed.rendezvous import rendezvous  # an error where torch has no distributed part

    store, _, _ = next(rendezvous("env://"))
    return store


def _gpu_of(share: Share) -> int:
    return share.number if launched() is None else int(os.environ.get("LOCAL_RANK", share.number))


# Followers


def follow_launched(share: Share, options: Options) -> None:
    """Be a follower that torchrun has started, until the leader has ended; an error if it has not said so.

    Why a leader has failed is for the leader to say: torchrun would end it as soon as a follower failed, too.
    """
    check_processes(options)
    store = _launchers_store()
    try:
        _follow(store, share, options.device, on_this_machine=False)
    except RuntimeError as error:
        if isinstance(error, Failed) or not _OF_OTHERS.search(str(error)):
            raise
        if not _has_ended(store):
            raise Failed(f"process 0 of {share.of}, which leads, does not answer; {_REMEDY}") from error
    store.set(f"left {share.number}", "")
    if dist.is_initialized():
        dist.destroy_process_group()


def _has_ended(store: _Store) -> bool:
    """Whether the leader, whose connections are broken, says soon that it has ended."""
    until = time.monotonic() + _GRACE
    with suppress(RuntimeError):  # where the store is gone, too
        while time.monotonic() < until:
            if store.check(["end"]):
                return True
            time.sleep(_LOOK)
    return False


def _be_follower(meeting: str, share: Share, device: str, leader: int) -> None:
    """Be a follower in a process of its own, which ends with the leader's."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the leader decides
    threading.Thread(target=_end_with, args=(leader,), daemon=True).start()
    store = dist.FileStore(meeting, share.of)  # type: ignore[attr-defined]
    try:
        _follow(store, share, device, on_this_machine=True)
    except BaseException:
        os._exit(1)  # at once: what torch does at exit may wait for the others
    os._exit(0)


def _end_with(leader: int) -> None:
    while os.getppid() == leader:
        time.sleep(_LOOK)
    os._exit(1)


def _follow(store: _Store, share: Share, device: str, *, on_this_machine: bool) -> None:
    """Take part in the leader's runs until it ends."""
    torch.set_num_threads(1)  # as a worker has it
    own = f"cuda:{_gpu_of(share)}" if device_kind(device) == "cuda" else device
    try:
        store.set(f"ready {share.number}", "")
        for number in itertools.count():
            while not (is_called := store.check([f"call {number}"])) and not store.check(["end"]):
                time.sleep(_LOOK)
            if not is_called:
                break
            if number == 0:
                _join(store, share, device, on_this_machine=on_this_machine)
                continue
            recipe, state, mask, lr, stops = ranks.from_first(_NOTHING)
            with suppress(Abandoned, Diverged):  # the leader knows
                for _ in train(recipe, state, mask, lr=lr, stops=stops, device=own, processes=dist.group.WORLD):
                    pass
    except Exception as error:
        if not (isinstance(error, RuntimeError) and _OF_OTHERS.search(str(error))):  # else it was left alone
            store.set(f"failed {share.number}", json.dumps(error_words(error)))
        raise


_NOTHING: _Run = None  # type: ignore[assignment]  # where the leader's is received
