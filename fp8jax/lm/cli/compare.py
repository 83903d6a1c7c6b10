"""Whether runs compare, and in which keys of the config they differ."""

import dataclasses
from collections.abc import Sequence

from fp8jax.lm.figures.run_files import RunFiles
from fp8jax.lm.records.differences import changed_values

# Keys that change which text is predicted, or in which tokens: nats a token then mean other things.
_SAME_TEXT = {
    "data": "other data",
    "tokenizer": "another tokenizer",
    "valid.fraction": "another share of the documents held out",
    "seq_len": "rows of another length",
}


def with_unique_names(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """Returns the runs with names that differ: as many last parts of their paths as it takes."""
    parts = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-depth:]) for each in parts]
        if len(set(names)) == len(names):
            return [
                dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)
            ]
    raise ValueError(f"a run is named twice: {', '.join(str(run.path) for run in runs)}")


def differences(runs: Sequence[RunFiles]) -> dict[str, list[str]]:
    """Returns key -> its value in each run, for the keys of the config in which the runs differ.

    A run whose version does not know a key has "" there, and does not make it a difference.
    """
    configs = [all_keys(run) for run in runs]
    keys = sorted({key for config in configs for key in config})
    table = {key: [config[key] if key in config else "" for config in configs] for key in keys}
    return {key: values for key, values in table.items() if len(set(values) - {""}) > 1}


def all_keys(run: RunFiles) -> dict[str, str]:
    """Returns every key of a run's config, dotted, with its value; {} if the config is unknown."""
    return {} if run.config is None else changed_values({}, run.config)


def why_not(run: RunFiles, baseline: RunFiles) -> list[str]:
    """Returns why the losses of two runs do not compare; [] if they do, as far as is known."""
    own, other = all_keys(run), all_keys(baseline)
    reasons = [
        f"{words} ({key}: {own[key]}, against {other[key]})"
        for key, words in _SAME_TEXT.items()
        if key in own and key in other and own[key] != other[key]
    ]
    if not reasons and None not in (run.data, baseline.data) and run.data != baseline.data:
        reasons.append("other text under the same name, as data.txt says")
    return reasons


def warnings(runs: Sequence[RunFiles]) -> list[str]:
    """Returns sentences on what of the runs does not compare with the first one."""
    first, *others = runs
    said = []
    for run in others:
        pair = f"{run.name} and {first.name}"
        if reasons := why_not(run, first):
            hint = ""
            if len(reasons) == 1 and reasons[0].startswith("another tokenizer"):
                hint = " Bits per byte of the validation text do."
            said.append(f"The losses of {pair} do not compare: {'; '.join(reasons)}.{hint}")
        elif run.config is None or first.config is None:
            said.append(f"It is not known whether the losses of {pair} compare: no config.json.")
        elif reads := other_validation(run, first):
            said.append(f"{pair} validate on other rows: {reads}.")
        devices = [_devices(each) for each in (run, first)]
        if None not in devices and devices[0] != devices[1]:
            said.append(f"The speeds of {pair} do not compare: {devices[0]}, against {devices[1]}.")
    return said


def other_validation(run: RunFiles, baseline: RunFiles) -> str:
    """Returns how many rows each of two runs validates on, if that differs; else ""."""
    keys = [all_keys(each) for each in (run, baseline)]
    if not all({"valid.batches", "batch_size"} <= key.keys() for key in keys):
        return ""
    rows = [
        "all"
        if key["valid.batches"] == "None"
        else f"{key['valid.batches']} batches of {key['batch_size']}"
        for key in keys
    ]
    return "" if rows[0] == rows[1] else f"{rows[0]}, against {rows[1]}"


def _devices(run: RunFiles) -> str | None:
    for event in reversed(run.events):
        if event["kind"] == "start" and "devices" in event:
            return str(event["devices"])
    return None
