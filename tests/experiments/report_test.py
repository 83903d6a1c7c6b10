"""What the report says of runs, whatever state their directories are in."""

import dataclasses
import functools
import html
import importlib.metadata
import itertools
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp8jax
from fp8jax import telemetry
from fp8jax.lm.cli import charts
from fp8jax.lm.cli.first_look import spikes
from fp8jax.lm.cli.page import report
from fp8jax.lm.data import urls
from fp8jax.lm.figures.run_files import read_run
from fp8jax.lm.records.events import Cause, Event
from fp8jax.lm.records.metrics import Metrics
from fp8jax.telemetry.files import StepFiles
from tests.support.commands import command_here
from tests.support.pages import page_of
from tests.support.run_files import row as telemetry_row
from tests.support.stores import BUCKET, s3_store, upload

CONFIG = {
    "precision": "fp8_block",
    "data": "python_stdlib",
    "tokenizer": "bytes",
    "num_steps": 4,
    "batch_size": 2,
    "seq_len": 8,
    "valid": {"batches": None, "fraction": 0.05},
    "model": "llama_tiny",
    "model_overrides": {"n_layers": None},
}


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    """Figures take seconds, and tests of their own: here the page says that there are none."""
    monkeypatch.setattr(charts, "have_matplotlib", lambda: False)


def write_run(folder, *, losses=(4.0, 3.0, 2.0, 1.0), events=(), rows=(), **config):
    """A run as the library writes it; the last step validates."""
    steps = len(losses)
    with Metrics(folder, num_steps=max(4, steps)) as metrics:
        metrics.event(0, Event.START, jax="0.10.2", devices="1 x cpu", policies="fp8_block")
        for step, loss in enumerate(losses, start=1):
            valid = {"valid_loss": loss + 0.5} if step == steps else {}
            metrics.write(step, {"loss": loss, "step_s": 0.1, "tokens_per_s": 160.0, **valid})
        for step, kind, fields in events:
            metrics.event(step, kind, **fields)
        if steps >= 4:
            metrics.event(steps, Event.END, reason="finished", seconds=1.5)
    folder.joinpath("config.json").write_text(json.dumps(CONFIG | config))
    folder.joinpath("precision.txt").write_text("GEMMs of a training step\nlayers/mlp/up  e4m3\n")
    folder.joinpath("data.txt").write_text("source  split\n")
    files = StepFiles(folder, 0)
    for step in sorted({row.step for row in rows}):
        files.write(step, [row for row in rows if row.step == step])
    return folder


def sections(*folders):
    """The text of each section of the page, by its id."""
    return page_of(report([read_run(folder) for folder in folders]))


def in_order(text, *parts):
    places = [text.find(part) for part in parts]
    assert -1 not in places, f"{[p for p, at in zip(parts, places, strict=True) if at < 0]} lacks"
    assert places == sorted(places)


def test_a_sound_run_has_nothing_to_look_at(tmp_path):
    text = report([read_run(write_run(tmp_path / "a"))])
    assert '<span class="good">finished' in text
    page = page_of(text)
    first = page["first"]
    assert "finished at step 4 of 4" in first and "No step was rejected" in first
    assert "matplotlib is not installed" in first and "pip install matplotlib" in first
    assert "There is no telemetry" in first and "Tensors out of line" not in first
    in_order(page["runs"], "precision", "fp8_block", "whole configuration", "batch_size = 2")
    in_order(page["loss"], "last validation loss", "1.5000", "best", "1.5000, step 4")
    in_order(page["speed"], "tokens a second, median", "160", "step, median, ms", "100.0")
    assert "CPUs do not" in page["memory"]
    in_order(page["events"], "Step 0: start", "devices: 1 x cpu", "Step 4: end", "seconds: 1.5")
    assert "layers/mlp/up e4m3" in page["precision"]


def test_the_page_begins_with_what_one_compares_first(tmp_path):
    memory = {"memory": {"weights": 2**30, "total": 3 * 2**30}, "compile_s": 4.0, "policy": "p"}
    compiled = [(0, Event.STAGE, memory), (0, Event.STAGE, memory | {"policy": "q"})]
    compiled += [(1, Event.TELEMETRY, {"compile_s": 3.0})]
    a = write_run(tmp_path / "a", events=compiled)
    b = write_run(tmp_path / "b", losses=(4.0, 3.0, 2.0, 1.15))
    text = report([read_run(a), read_run(b)])
    assert text.index('id="summary"') < text.index('id="first"')
    page = page_of(text)
    in_order(page["summary"], "validation loss", "1.5000", "1.6500", "above that of a", "+10.00%")
    in_order(page["summary"], "ms a step, median 100.0 100.0", "tokens a second, median 160 160")
    in_order(page["summary"], "GiB 3.000 not recorded")
    assert "compiling steps, s 4.0" in page["speed"]  # both stages say the seconds of both
    assert "compiling telemetry meanwhile, s 3.0" in page["speed"]  # no part of that sum
    in_order(page["memory"], "weights, GiB 1 not recorded", "XLA allocates, GiB 3 not recorded")


def test_the_pointer_finds_the_losses_of_a_step(tmp_path):
    steps = 130
    runs = [
        read_run(write_run(tmp_path / name, losses=[factor * (2 + 1 / s) for s in range(1, steps)]))
        for name, factor in (("a", 1.0), ("b", 1.01))
    ]
    (chart,) = charts.loss_charts(runs)
    spots = chart.hover.spots
    assert 30 < len(spots) <= 60 and 0 < chart.hover.top < chart.hover.bottom < 50
    for spot, following in itertools.pairwise(spots):  # side by side, each around its step
        assert abs(spot.left + spot.width - following.left) < 1e-9 and 0 < spot.at < 100
    assert 0 < spots[0].left < spots[-1].left + spots[-1].width < 100
    (step, a, b) = spots[-1].lines
    assert step == "step 129" and re.fullmatch(r"a: 2\.0\d{3}, validation 2\.5078", a)
    assert re.fullmatch(r"b: 2\.0\d{3} \(\+1\.00%\), validation 2\.5278", b)
    page = report(runs)
    assert "<script" not in page and 'class="spot' not in page  # there are no figures here


def test_stops_spikes_and_recovery_in_order_of_steps(tmp_path):
    fields = {"loss": 9.5, "grad_norm": float("inf"), "spent": {"skip": 2}}
    page = sections(
        write_run(
            tmp_path,
            losses=(4.0, 3.0, 9.5),
            events=[
                (2, Event.SKIP, fields | {"cause": Cause.SPIKE}),
                (3, Event.SKIP, fields | {"cause": Cause.SPIKE}),
                (4, Event.STOP, fields | {"cause": Cause.NON_FINITE, "first": "logits"}),
                (3, Event.END, {"reason": "NonFiniteError"}),
            ],
        )
    )
    in_order(
        page["first"],
        "stopped at step 4 of 4 (NonFiniteError)",
        "Step 2: rejected, a loss spike (loss 9.5, grad_norm inf); the batch was skipped; 1 more",
        "Step 4: rejected, not finite",
        "the run stopped; the first tensor that was not finite: logits",
    )


def test_a_spike_that_nothing_rejected_is_found():
    steady = {step: 2.0 + 0.01 * (step % 3) for step in range(1, 101)}
    assert spikes(steady) == []
    (found,) = spikes(steady | {60: 3.0, 61: 2.9})
    assert found.step == 60 and "spikes to 3 over 2 steps, from a median of 2.01" in found.text
    raised = {step: loss + 5 * (step > 60) for step, loss in steady.items()}
    (found,) = spikes(raised)  # it stays there: one note
    assert found.step == 61


def test_a_loss_that_rises_is_said(tmp_path):
    page = sections(write_run(tmp_path, losses=(4.0, 3.0, 3.5, 5.0)))
    assert "Step 2: the training loss was lowest, 3, and rose to 5 by step 4" in page["first"]
    page = sections(write_run(tmp_path, losses=(4.0, float("nan"), 3.0, 2.0)))
    assert "Step 2: the training loss is nan" in page["first"]


def test_a_validation_loss_that_is_nan_is_said(tmp_path):
    """The one before it would call ruined weights good."""
    sound, ruined = write_run(tmp_path / "sound"), write_run(tmp_path / "ruined")
    lines = (ruined / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1]) | {"valid_loss": "NaN"}
    before = json.loads(lines[-2]) | {"valid_loss": 1.0}
    lines[-2:] = json.dumps(before), json.dumps(last)
    (ruined / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = sections(sound, ruined)
    assert "Step 4: the validation loss is nan" in page["first"]
    in_order(page["summary"], "validation loss", "1.5000", "nan", "not finite at step 4")
    assert "Validation loss against sound: not finite at step 4" in page["first"]


def test_batches_that_differ_are_no_rise(tmp_path):
    """Small batches: each loss is off by a tenth, and a mean of three by 6%."""
    steps = np.arange(1, 61)
    noise = np.random.default_rng(0).normal(0, 0.3, len(steps))
    losses = 3 + 2 / steps + noise
    losses[44:47], losses[57:] = 3.0, 3.25  # a lucky window, and the last one: 8% above it
    quiet = sections(write_run(tmp_path / "noisy", losses=losses.tolist()))
    assert "rose to" not in quiet["first"]
    smooth = 3 + 2 / steps + 0.1 * noise
    smooth[57:] = 3.25
    risen = sections(write_run(tmp_path / "smooth", losses=smooth.tolist()))
    assert "the training loss was lowest" in risen["first"]


def test_runs_are_compared_with_the_first(tmp_path):
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", losses=(4.0, 3.0, 2.0, 1.15), precision="fp4_naive", new_key=1)
    page = sections(a, b)
    assert "do not compare" not in page["first"]
    assert "Validation loss against a: +10.00% at step 4" in page["first"]
    differs = page["runs"].partition("What differs in the configuration")[2]
    differs = differs.partition("whole configuration")[0]
    in_order(differs, "precision", "'fp8_block'", "'fp4_naive'")
    assert "new_key" not in differs and "batch_size" not in differs


def test_a_page_of_many_runs_is_called_after_the_first(tmp_path):
    runs = [read_run(write_run(tmp_path / name)) for name in "abcde"]
    for most, heading in ((4, "a, b, c, d"), (5, "a and 4 others")):
        page = report(runs[:most])
        assert f"<h1>{heading}</h1>" in page
        assert f"<title>{heading}: fp8jax report</title>" in page


@pytest.mark.parametrize(
    "change, said",
    [
        ({"data": "text:other"}, "do not compare: other data (data: 'text:other', against"),
        ({"tokenizer": "bpe:x"}, "another tokenizer (tokenizer: 'bpe:x', against 'bytes'). Bits"),
        ({"seq_len": 16}, "rows of another length (seq_len: 16, against 8)"),
    ],
)
def test_runs_that_do_not_compare(tmp_path, change, said):
    page = sections(write_run(tmp_path / "a"), write_run(tmp_path / "b", **change))
    in_order(page["first"], "These runs do not compare", "The losses of b and a", said)
    assert "Validation loss against a: does not compare" in page["first"]


def test_other_text_rows_and_devices(tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", valid={"batches": 2})
    events = b / "events.jsonl"
    events.write_text(events.read_text().replace("1 x cpu", "8 x H200"))
    first = sections(a, b)["first"]
    assert "b and a validate on other rows: 2 batches of 2, against all" in first
    assert "speeds of b and a do not compare: 8 x H200, against 1 x cpu" in first
    b.joinpath("data.txt").write_text("source  other\n")
    assert "other text under the same name" in sections(a, b)["first"]


def test_old_half_written_and_running_runs(tmp_path):
    run = write_run(tmp_path / "a", losses=(4.0, 3.0))
    with run.joinpath("metrics.jsonl").open("a") as log:
        log.write('{"step": 3, "lo')
    text = report([read_run(run)])
    assert "has not ended: it still runs, or was killed; step 2 of 4, last written 20" in text
    assert '<span class="plain">has not ended' in text  # neither good nor bad
    old = tmp_path / "old"
    old.mkdir()
    old.joinpath("metrics.jsonl").write_text('{"step": 7, "loss": 2.0}\n{"step": 8}\n')
    page = sections(old)
    assert "reached step 8; how it ended is not recorded" in page["first"]
    assert "Whether steps were rejected is not recorded" in page["first"]
    for file in ("events.jsonl", "config.json", "precision.txt", "data.txt", "telemetry"):
        assert f"There is no {file}" in page["first"]
    assert "2.0000" in page["loss"] and "No events were recorded" in page["events"]
    empty = tmp_path / "empty"
    with Metrics(empty, num_steps=2):
        page = sections(empty, old)
    assert "metrics.jsonl has no lines yet" in page["first"]
    assert "It is not known whether the losses of old and empty compare" in page["first"]


def test_only_the_last_fresh_start_counts(tmp_path):
    stop = (2, Event.STOP, {"cause": "spike", "loss": 9.0, "grad_norm": 1.0})
    write_run(tmp_path, losses=(4.0,), events=[stop])
    page = sections(write_run(tmp_path))  # the same directory, from step 0
    assert "No step was rejected" in page["first"] and "Step 2: stop" in page["events"]


def test_text_of_a_run_is_text(tmp_path):
    write_run(tmp_path, data="<script>alert(1)</script>", events=[(1, "<b>", {"x": "<i>"})])
    page = report([read_run(tmp_path)])
    assert "<script" not in page and "<b>" not in page and "<i>" not in page
    assert "&lt;script&gt;" in page


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    page = report([read_run(write_run(tmp_path))])
    assert "default-src 'none'" in page and "<script" not in page
    for address in re.findall(r'(?:src|href|srcset|action)="([^"]*)"', page):
        assert html.unescape(address).startswith(("#", "data:")), address


def test_a_checkout_that_is_not_installed(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "by fp8jax (not installed)" in report([read_run(write_run(tmp_path))])


def test_the_command(tmp_path, capsys):
    run, other = write_run(tmp_path / "x" / "run"), write_run(tmp_path / "y" / "run")
    output = tmp_path / "new" / "page.html"
    with command_here("report") as call:
        call(str(run), str(other), f"--output={output}")
        assert "wrote" in capsys.readouterr().out
        assert "x/run, y/run" in output.read_text()
        for arguments, message in [
            ([], "name the directory of a run"),
            ([str(tmp_path / "none")], "no such directory"),
            ([str(tmp_path)], "is not the directory of a run"),
            ([str(run), str(run)], "a run is named twice"),
            ([str(run), "--output=page.txt"], "name a file ending in .html"),
            (["http://host/run"], "http://host/run: http:// is not read"),
        ]:
            with pytest.raises(SystemExit, match=message):
                call(*arguments)


def same_page(tmp_path, url):
    """Whether the page of a URL, beside another run, is that of the same run here."""
    names = ("here", "stored")
    other = str(tmp_path / "other" / "run")
    with command_here("report") as call:
        for name, run in zip(names, (str(tmp_path / "x" / "run"), url), strict=True):
            call(run, other, f"--output={tmp_path / name}.html")
    here, stored = (page_of((tmp_path / f"{name}.html").read_text()) for name in names)
    for page in (here, stored):  # the time of the page itself
        assert "x/run" in page["summary"] and "other/run" in page["summary"]
    return here["loss"] == stored["loss"] and here["telemetry"] == stored["telemetry"]


@pytest.fixture
def two_runs(tmp_path):
    """Two runs of one name, and a checkpoint of the first, which the page does not need."""
    run = write_run(tmp_path / "x" / "run", rows=[telemetry_row(step=2)])
    write_run(tmp_path / "other" / "run", losses=(4.0, 3.5, 3.0, 2.5))
    (run / "checkpoints" / "3").mkdir(parents=True)
    (run / "checkpoints" / "3" / "large").write_text("x")
    return run


def test_a_run_in_a_store_is_that_run(tmp_path, monkeypatch, two_runs):
    """With a folder for the store."""
    copied = []

    def copy(files, root, target):
        found = list(files)
        copied.extend(path.name for path in found)
        copy_files(found, root, target)

    copy_files = urls.copy_files
    monkeypatch.setattr(urls, "copy_files", copy)
    monkeypatch.setattr(urls, "as_path", lambda url: tmp_path / url.removeprefix("s3://"))
    assert same_page(tmp_path, "s3://x/run/")
    assert {"metrics.jsonl", "events.jsonl", "config.json"} <= set(copied)
    assert "large" not in copied and [n for n in copied if n.startswith("step_")]
    with command_here("report") as call:
        for url, message in (
            ("s3://x/none", "no such directory: s3://x/none"),
            (
                "s3://x",
                "is not the directory of a run: it has no metrics.jsonl and no events.jsonl",
            ),
        ):
            with pytest.raises(SystemExit, match=message):
                call(url)


@pytest.mark.full
def test_a_run_in_s3_is_that_run(tmp_path, monkeypatch, two_runs):
    with s3_store(monkeypatch) as store:
        upload(store, two_runs, "x/run")
        assert same_page(tmp_path, f"s3://{BUCKET}/x/run")
        with command_here("report") as call:
            with pytest.raises(SystemExit, match=f"no such directory: s3://{BUCKET}/x/none"):
                call(f"s3://{BUCKET}/x/none")
            with pytest.raises(SystemExit, match=f"s3://{BUCKET}/x is not the directory of a run"):
                call(f"s3://{BUCKET}/x")


# Tensors out of line ------------------------------------------------------------------------------

X = jax.random.normal(jax.random.key(0), (8, 16))


class Model(nn.Module):
    recipe: str

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = x + fp8jax.nn.Dense(16, self.recipe)(nn.relu(x))
        return x


@functools.cache
def made(recipe):
    """The variables of a model, and its loss; histories are filled."""
    model = Model(recipe)

    @jax.jit
    def loss(variables, x):
        return jnp.mean(model.apply(variables, x) ** 2)

    variables = jax.jit(model.init)(jax.random.key(1), X)
    return fp8jax.histories.seed(lambda v: loss(v, X), variables), loss


def rows_at(step, recipe, variables, x=X, **kwargs):
    table = telemetry.measure(made(recipe)[1], variables, x, **kwargs)
    return [dataclasses.replace(row, step=step) for row in table.rows]


def out_of_line(text):
    """The names that the page calls out of line, in its order."""
    return re.findall(r"Step \d+: ([xwg]) of (\S+?):", text)


def test_one_weight_times_1000_is_flagged_and_no_other(tmp_path):
    variables, _ = made("fp8_current")
    measure = functools.partial(rows_at, recipe="fp8_current", what_if="fp4_naive")
    before = measure(1, variables=variables)
    page = sections(write_run(tmp_path / "sound", rows=before))
    assert "No tensor is out of line in 1 sampled step." in page["first"]
    changed = jax.tree.map(lambda x: x, variables)
    kernel = changed["params"]["Dense_2"]["kernel"]
    changed["params"]["Dense_2"]["kernel"] = kernel.at[3, 5].multiply(1000)
    rows = [*before, *measure(2, variables=changed)]
    page = sections(write_run(tmp_path / "changed", rows=rows))
    assert out_of_line(page["first"]) == [("w", "Dense_2")]
    assert "its amax" in page["first"] and "times its largest before" in page["first"]
    in_order(page["telemetry"], "worst casts of step 2", "x of Dense_0 e4m3", "w of Dense_2 e4m3")
    said = r"fp4_naive would cast weights with \d+\.\d dB more noise in the median, and with less"
    assert re.search(f"{said} noise in 0% of all casts", page["telemetry"])


def test_an_amax_spike_in_a_delayed_run_is_named_first_tensor_first(tmp_path):
    recipe = "fp8_delayed:history=4"
    variables, _ = made(recipe)
    rows = [*rows_at(1, recipe, variables), *rows_at(2, recipe, variables, 64 * X)]
    page = sections(write_run(tmp_path, rows=rows))
    in_order(page["first"], "Step 2: x of Dense_0: its delayed scale is 64 times too small", "clip")
    assert out_of_line(page["first"])[0] == ("x", "Dense_0")


def test_a_four_bit_run_that_diverges_is_named_first_tensor_first(tmp_path):
    variables, loss = made("fp4_naive")
    differentiated = jax.jit(jax.value_and_grad(loss))
    rows, losses = [], []
    for step in range(1, 5):
        rows += rows_at(step, "fp4_naive", variables)
        value, grads = differentiated(variables, X)
        losses.append(float(value))
        variables = jax.tree.map(lambda p, g: p - 300.0 * g, variables, grads)
    page = sections(write_run(tmp_path, losses=losses, rows=rows, precision="fp4_naive"))
    # The first update makes the weights large; the loss follows in the same step's forward pass.
    assert out_of_line(page["first"])[0] == ("w", "Dense_0")
    in_order(page["first"], "Step 2: w of Dense_0: its amax", "times its largest before")
    in_order(page["first"], "Stops, spikes", "Step 1: the training loss was lowest")
