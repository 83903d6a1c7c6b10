"""Keys that got other names: who uses an old one is told the new one, and old runs go on."""

import json
from types import SimpleNamespace

import pytest

from configs import base
from fp8jax.lm.records.checkpoint import Checkpointer
from fp8jax.lm.records.config_keys import OLD_KEYS, REMOVED, answer, by_path, with_new_keys
from fp8jax.lm.training.build import build
from fp8jax.lm.training.optional_state import histories_key
from fp8jax.lm.training.resume import read_checkpoint
from tests.support import ROOT
from tests.support.old_configs import without_groups
from tests.support.runs import one_layer
from tests.support.untrained import write_checkpoints


def test_every_key_of_a_stored_config_is_known():
    """config_before_groups.json is base.py's as it was, with every key side by side."""
    stored = json.loads((ROOT / "tests/lm/records/config_before_groups.json").read_text())
    assert OLD_KEYS.keys() < stored.keys()
    now = with_new_keys(stored)
    config = base.get_config()
    assert by_path(type(config)(now)).keys() <= by_path(config).keys()
    for old, new in OLD_KEYS.items():
        group, _, name = new.partition(".")
        assert now[group][name] == stored[old]
    assert with_new_keys(now) == now and without_groups(now) == stored


def test_a_run_of_before_goes_on(data, tmp_path):
    config = one_layer(data, precision="fp8_delayed")
    run = build(config)
    stored = without_groups(run.settings.record)
    assert "valid_every" in stored and "valid" not in stored
    write_checkpoints(tmp_path, config, [3], config=stored, data="text")
    with Checkpointer(tmp_path / "checkpoints", every=1, keep=1, keep_best=0) as checkpointer:
        restored, changes = read_checkpoint(checkpointer, run, SimpleNamespace(fingerprint="text"))
    assert restored.step == 3 and changes == []
    assert restored.meta["config"] == run.settings.record
    assert restored.arrays.keys() == {"params", "state", *(p.item for p in run.optional_state)}


def test_a_switch_that_is_gone():
    """Off it was as today. Where it was on, no linear of today's policies is known to have run."""
    assert with_new_keys({"size_gate": False, "seed": 1}) == {"seed": 1}
    on = with_new_keys({"size_gate": True, "seed": 1})
    assert on == {"size_gate": True, "seed": 1}
    record = json.loads(base.get_config().to_json())
    assert histories_key(record | on, 1) != histories_key(record, 1) == histories_key(record, 2)


@pytest.mark.parametrize("old", [*OLD_KEYS, *REMOVED])
def test_a_config_with_an_old_key_is_refused(data, old):
    config = one_layer(data)
    if old in config:  # a group now
        del config[old]
    config[old] = 1
    with pytest.raises(ValueError, match=answer(old)):
        build(config)
