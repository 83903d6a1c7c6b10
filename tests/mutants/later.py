"""Faults in code that came after the first list of mutants, in its functions that decide something.

Each was written on the code, before it was known which tests find it.
"""

from tests.mutants.mutant import Mutant as M

NUMERICS = (  # recipes of 2026
    M("FourOverSix.four", "off by one", "amax, tensor, 4.0", "amax, tensor, 5.0"),
    M("quantization:_scales", "comparison", "four_error < six_error", "four_error > six_error"),
    M("_least_squares", "comparison", "else total < least", "else total > least"),
    M("Mse.at", "sign", "exponent - binades", "exponent + binades"),
    M(
        "Bias.__call__",
        "dropped call",
        "jnp.clip(self._exponent(amax, fmt), -31, 31)",
        "self._exponent(amax, fmt)",
    ),
)

OPTIM = (
    M("muon:labels", "comparison", "in keys and keys[-1]", "in keys or keys[-1]"),
    M("_scale_by_shape", "axis", "max(u.shape[-2:])", "max(u.shape[:-1])"),
    M(
        "reset_oscillating",
        "off by one",
        "phase == PERIOD - WINDOW, ",
        "phase == PERIOD - WINDOW + 1, ",
    ),
    M("reset_oscillating", "comparison", "state.step >= begin", "state.step > begin"),
)

COMMANDS = (
    M("cluster:place_of", "comparison", "found.index >= found.count", "found.index > found.count"),
    M("_tasks_here", "dropped call", "range(int(times or 1))", "range(1)"),
    M(
        "cluster:_share",
        "off by one",
        "range(local * each, (local + 1) * each)",
        "range(local, local + each)",
    ),
    M(
        "_Room._enter",
        "comparison",
        "0 <= guest.index < guest.count",
        "0 <= guest.index <= guest.count",
    ),
    M("_Wait.over", "sign", "self._timeout_s + more_s", "self._timeout_s - more_s"),
)

TRAINING = (
    M("config_facts", "comparison", "if key not in _OF_THE_HOST", "if key in _OF_THE_HOST"),
    M("agree:_compare", "swapped arguments", "for f in (first, facts)", "for f in (facts, first)"),
    M("agree:_code_facts", "dropped call", "sorted(flag for flag in", "list(flag for flag in"),
)

DATA = (
    M("digests:_kept", "comparison", '["file"] == _file(path)', '["file"] != _file(path)'),
    M("digests:_read", "sign", "now - max(numbers[2:])", "now + max(numbers[2:])"),
    M("data_folder", "off by one", 'pattern.count("/") + 1', 'pattern.count("/") + 2'),
)

ANALYSIS = (
    M(
        "wire:_transfers",
        "swapped arguments",
        'given if kind == "reduce-scatter" else taken',
        'taken if kind == "reduce-scatter" else given',
    ),
    M("require_fp8_gathers", "comparison", "each.bits > 8", "each.bits >= 8"),
)

MODEL = (
    M(
        "kind_of",
        "dropped call",
        "frequencies(c.window_rope_theta, size)",
        "frequencies(c.rope_theta, size)",
    ),
    M("_nearest", "axis", "*reversed(each)", "*each"),
)

LATER = (*NUMERICS, *OPTIM, *COMMANDS, *TRAINING, *DATA, *ANALYSIS, *MODEL)
