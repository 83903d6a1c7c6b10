"""Rows to batches: every step's rows the same at each start, on any number of processes."""

import itertools
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fp8jax.lm.data.loader import TimedIterator, share_of_rows, train_batches, valid_batches
from fp8jax.lm.data.mixture import Mixture
from tests.support import ROOT
from tests.support.rows import assert_rows_equal, build, numbered
from tests.support.text import write_generated_text

MIXTURE = Mixture({"numbered": numbered(10)})


def take(rows, count: int, *, start_row: int = 0, **options) -> list[int]:
    """The numbers of the rows in the first `count` training batches from a position on."""
    mixture = Mixture({"numbered": rows})
    position = mixture.start().advanced(start_row)
    batches = train_batches(mixture, position=position, **options)
    numbers = [batch["tokens"][:, 0].tolist() for batch in itertools.islice(batches, count)]
    batches.close()
    return sum(numbers, [])


def test_epochs_differ_and_hold_each_row_once():
    rows = numbered(13)
    order = take(rows, 13, seed=3, batch_size=4)
    epochs = [order[i : i + 13] for i in range(0, 52, 13)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(13))
    assert len(set(map(tuple, epochs))) == 4
    assert order != take(rows, 13, seed=4, batch_size=4)
    assert epochs[0] == take(rows, 13, seed=3, batch_size=1)


def test_the_order_is_pinned():
    # A resumed run relies on it: should a new Grain shuffle otherwise, this has to be known.
    pinned = [1, 2, 4, 5, 3, 7, 0, 6, 7, 6, 1, 4, 2, 0, 3, 5]
    assert take(numbered(8), 4, seed=0, batch_size=4) == pinned


@pytest.fixture(scope="module")
def order():
    """The global order of ten rows, one position at a time."""
    return take(numbered(10), 1100, seed=1, batch_size=1)


@pytest.mark.parametrize(
    ("batch_size", "start_row", "process_count"),
    [(4, 0, 1), (4, 12, 2), (8, 24, 1), (8, 24, 4), (12, 7, 1), (12, 7, 4), (8, 1001, 2)],
)
def test_order_depends_on_the_position_only(order, batch_size, start_row, process_count):
    shares = [
        take(
            numbered(10),
            3,
            seed=1,
            batch_size=batch_size,
            start_row=start_row,
            process_index=index,
            process_count=process_count,
        )
        for index in range(process_count)
    ]
    # Batches are cut into contiguous slices, one a process.
    joined = np.concatenate([np.reshape(share, (3, -1)) for share in shares], axis=1)
    assert joined.ravel().tolist() == order[start_row : start_row + 3 * batch_size]


def test_batches_of_a_corpus_resume(tmp_path):
    corpus = build(write_generated_text(tmp_path), tmp_path)
    whole = train_batches(corpus.train, seed=0, batch_size=6)
    position = corpus.train.start().advanced(6 * 20)
    first = list(itertools.islice(whole, 50))
    resumed = train_batches(corpus.train, seed=0, batch_size=6, position=position)
    for left, right in zip(first[20:], resumed, strict=False):
        assert_rows_equal(left, right)
    assert {key: value.shape for key, value in first[0].items()} == dict.fromkeys(
        ("tokens", "targets", "segments", "positions", "weights"), (6, 32)
    )
    for batches in (whole, resumed):
        batches.close()


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]


@pytest.mark.parametrize("end", ["close", "drop", "unused"])
def test_threads_end(end):
    before = set(prefetching())
    batches = train_batches(MIXTURE, seed=0, batch_size=2)
    if end != "unused":
        next(batches)
        assert set(prefetching()) - before
    if end == "close":
        batches.close()
    else:
        del batches
    deadline = time.monotonic() + 10
    while set(prefetching()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not set(prefetching()) - before


@pytest.mark.parametrize("end", ["close", "drop"])
@pytest.mark.parametrize("state", ["waits_for_a_reader", "fetches"])
def test_a_timed_iterator_ends_its_thread(state, end):
    before, go_on = set(threading.enumerate()), threading.Event()
    if state == "fetches":
        items = (go_on.wait() for _ in itertools.count())
    else:
        items = itertools.count()
    timed = TimedIterator(items, timeout=10)
    if state == "waits_for_a_reader":
        assert (next(timed), next(timed)) == (0, 1)
    (thread,) = set(threading.enumerate()) - before
    if end == "close":
        timed.close()
    else:
        del timed
    go_on.set()
    thread.join(timeout=10)
    assert not thread.is_alive()


def _interrupt(process) -> str:
    """Ctrl-C until it ends, and what it wrote to stderr. Once in a few hundred times the interrupt
    comes while Python runs a finaliser, which swallows it: then a user presses again.

    A shell's background jobs, which these tests may be, start with it ignored, and Python leaves it
    so: the child takes it back.
    """
    for _ in range(4):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=10)[1]
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("it runs on after four interrupts")


def test_ctrl_c_ends_the_program():
    program = """
import signal
from tests.lm.data.loader_test import MIXTURE, train_batches
signal.signal(signal.SIGINT, signal.default_int_handler)
batches = train_batches(MIXTURE, seed=0, batch_size=2)
print(next(batches)["tokens"].shape, flush=True)
for batch in batches:
    pass
"""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "(2, 3)\n"
        try:
            errors = _interrupt(process)
        finally:
            process.kill()  # where it did not end, it would load the machine for all other tests
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    lost = errors.count("Exception ignored in")  # by a finaliser, see above
    assert errors.count("Traceback") == 1 + lost  # and nothing about threads


@pytest.mark.parametrize("process_count", [1, 2, 4])
def test_valid_batches(process_count):
    rows = numbered(10)
    shares = [
        list(valid_batches(rows, batch_size=4, process_index=i, process_count=process_count))
        for i in range(process_count)
    ]
    assert [len(share) for share in shares] == [3] * process_count
    whole = [
        {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        for parts in zip(*shares, strict=True)
    ]
    tokens = np.concatenate([batch["tokens"][:, 0] for batch in whole])
    weights = np.concatenate([batch["weights"][:, 0] for batch in whole])
    assert tokens.tolist() == [*range(10), 0, 0]
    assert weights.tolist() == [1] * 10 + [0, 0]
    assert all(value.shape == (4, 3) for batch in whole for value in batch.values())


def test_valid_batches_may_be_fewer():
    rows = numbered(10)
    assert len(list(valid_batches(rows, batch_size=4, max_batches=2))) == 2
    assert len(list(valid_batches(rows, batch_size=4, max_batches=9))) == 3
    assert len(list(valid_batches(rows, batch_size=5))) == 2
    with pytest.raises(ValueError, match="max_batches must be at least 1 or None, got 0"):
        valid_batches(rows, batch_size=4, max_batches=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 6, "process_count": 4}, "batch_size=6 .* multiple of process_count=4"),
        ({"batch_size": 0}, "batch_size=0 must be a positive multiple"),
        ({"batch_size": 4, "process_count": 2, "process_index": 2}, "process_index=2"),
        ({"batch_size": 4, "process_index": -1}, "process_index=-1"),
        ({"batch_size": 4, "process_count": 0}, "process_count=0"),
    ],
)
def test_bad_batches(options, message):
    with pytest.raises(ValueError, match=message):
        train_batches(MIXTURE, seed=0, **options)
    with pytest.raises(ValueError, match=message):
        valid_batches(numbered(10), **options)


class Held:
    """A sharding of which some devices are this process's."""

    def __init__(self, sharding, devices):
        self.sharding, self.devices = sharding, devices

    def addressable_devices_indices_map(self, shape):
        indices = self.sharding.devices_indices_map(shape)
        return {device: indices[device] for device in self.devices}


@pytest.mark.parametrize(
    ("axes", "a_process", "expected"),
    [
        ((4, 2, 1), 1, [(i, 8) for i in range(8)]),
        ((4, 2, 1), 4, [(0, 2), (1, 2)]),
        ((2, 2, 2), 2, [(i, 4) for i in range(4)]),
        # Processes that an axis `tensor` spans hold the same rows.
        ((2, 2, 2), 1, [(i // 2, 4) for i in range(8)]),
        ((1, 2, 4), 2, [(i // 2, 2) for i in range(4)]),
        ((1, 1, 8), 4, [(0, 1), (0, 1)]),
        ((2, 2, 2), 8, [(0, 1)]),
    ],
)
def test_a_process_reads_the_rows_of_its_devices(axes, a_process, expected):
    devices = jax.devices()[:8]
    mesh = Mesh(np.reshape(devices, axes), ("data", "fsdp", "tensor"))
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None))
    processes = [devices[i : i + a_process] for i in range(0, 8, a_process)]
    assert [share_of_rows(Held(sharding, mine), 16) for mine in processes] == expected
    if axes == (4, 2, 1):
        for others in (devices[::2], devices[1:3]):
            with pytest.raises(ValueError, match=r"hold one of .* and hold rows \[\(\d+, \d+\), "):
                share_of_rows(Held(sharding, others), 16)


def test_bad_training_batches():
    with pytest.raises(ValueError, match="rows must not be negative, got -1"):
        MIXTURE.start().advanced(-1)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=rf"seed must be in \[0, 2\^32\), got {seed}"):
            train_batches(MIXTURE, seed=seed, batch_size=2)
    with pytest.raises(ValueError, match="no rows to batch"):
        valid_batches([], batch_size=2)
