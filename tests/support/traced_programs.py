"""Programs of runs that a file's tests trace once, whatever number of runs have them.

`build` makes new jitted functions for each run, and JAX traces and lowers them anew: for a run of
seconds most of its time. Runs whose configs differ in what no program depends on, which
tests/lm/training/numbers_test.py shows, share the functions here. So do a run and the one that
resumes it. A file whose tests replace nothing that programs are traced from asks for it:

    @pytest.fixture(scope="module", autouse=True)
    def traced():
        with traced_once():
            yield
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest

from fp8jax.lm.records.config_keys import by_path
from fp8jax.lm.training import build

# Keys and whole groups that no program depends on: data, the numbers of a step, when something is
# done; and the policy, which is in the key by itself.
_ELSEWHERE = frozenset(
    (
        "data",
        "cache_dir",
        "data_timeout",
        "long_examples",
        "bad_examples",
        "num_steps",
        "num_epochs",
        "optimizer.learning_rate",
        "optimizer.schedule",
        "optimizer.warmup_steps",
        "optimizer.warmup_fraction",
        "optimizer.decay_fraction",
        "optimizer.final_fraction",
        "optimizer.clip_norm",
        "recovery.ladder",
        "valid",
        "checkpoint",
        "resume_with_changes",
        "initial_state",
        "log_to",
        "precision",
        "precision_schedule",
        "seed",
    )
)


def _key(config: Any, shared: Any, *more: Any) -> tuple[Any, ...]:
    kept = {
        path: value
        for path, value in by_path(config).items()
        if _ELSEWHERE.isdisjoint((path, path.partition(".")[0]))
    }
    words = shared.tokenizer.token_bytes.tobytes()
    return json.dumps(kept, sort_keys=True), shared.mesh, shared.shape, words, *more


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """Runs that are built in here share their programs."""
    make_draft, make_programs = build._draft, build._programs
    drafts: dict[tuple[Any, ...], Any] = {}
    programs: dict[tuple[Any, ...], Any] = {}
    initialize: dict[Any, Any] = {}  # a draft's own

    def draft(config, shared, policy):
        key = _key(config, shared, policy), config.seed
        if key not in drafts:
            drafts[key] = make_draft(config, shared, policy)
        return drafts[key]

    def of_stage(config, shared, model, initial, state, shardings):
        # The seed is in the state. Moments that are rounded stochastically have it, too.
        plain = config.optimizer.name == "adamw" and config.optimizer.moments == "float32"
        key = _key(config, shared, model), None if plain else config.seed
        if key not in programs:
            programs[key] = make_programs(config, shared, model, initial, state, shardings)
        if initial not in initialize:
            initialize[initial] = build._initialize(shared, initial, state, shardings)
        return dataclasses.replace(
            programs[key], numbers=shared.numbers, initialize=initialize[initial]
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_draft", draft)
        patch.setattr(build, "_programs", of_stage)
        yield
