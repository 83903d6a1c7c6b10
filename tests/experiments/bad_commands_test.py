"""Bad inputs of the training command: each ends with status 1 and one line that names the cause.

A row is (id, flags, regex of the line). All rows run in this process, from the parsing of the flags
on, and none compiles a program. DIR in a flag is a folder of bad files; flags that begin with a key
are --config.KEY=VALUE.

A message as the argument of SystemExit is what Python writes to stderr, before status 1.
"""

import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import base
from experiments.config_keys import PIPELINE_KEYS
from fp8jax.lm.cli import command
from fp8jax.lm.cli.config_flag import check_config_flags
from fp8jax.lm.records.checkpoint import Checkpointer
from fp8jax.lm.records.run_checkpoint import CHECKPOINT_VERSION, CONVERTED_FROM
from fp8jax.lm.records.workdir_lock import lock_workdir
from tests.support.annotations import unchecked_annotations  # noqa: F401
from tests.support.chats import pairs, write_chats
from tests.support.commands import command_here
from tests.support.text import write_generated_text
from tests.support.traced_programs import traced_once


@pytest.fixture(scope="module", autouse=True)
def traced():
    with traced_once():
        yield


MAX_LENGTH = 500  # of a line; the longest list all models

# A model of two small layers; its text is a few hundred documents.
SMALL = (
    "data=jsonl:DIR/generated-0.jsonl",
    "cache_dir=DIR/cache",
    "valid.fraction=0.1",
    "seq_len=64",
    "num_steps=20",
    "optimizer.warmup_steps=5",
    "model_overrides.d_model=64",
    "model_overrides.n_layers=2",
    "model_overrides.n_heads=4",
    "model_overrides.n_kv_heads=2",
    "model_overrides.d_ff=128",
    "model_overrides.head_dim=16",
)

CHATS, TEMPLATE = "data=chat:DIR/chats/chats.jsonl", "tokenizer=bpe:DIR/chats/tokenizer.json"

GOOD_CHATS = "data=chat:DIR/chats/chats2.jsonl"
HI = {"role": "user", "content": "Hi"}
ENDS_WITH_USER = {"messages": [HI, {"role": "assistant", "content": "Hello"}, HI]}

CONFIG_FILES = {
    "empty": "x = 1\n",
    "syntax": "import os\ndef get_config(:\n",
    "name": "def get_config():\n    return confg\n",
    "import": "import nowhere\n",
    "none": "def get_config():\n    pass\n",
    "dict": "def get_config():\n    return {'a': 1}\n",
    "typo": "from configs import base\ndef get_config():\n    config = base.get_config()\n"
    "    config.lerning_rate = 3\n    return config\n",
    "old": "from configs import base\ndef get_config():\n    config = base.get_config()\n"
    "    config.sample_every = 3\n    return config\n",
    "former": "from configs import base\ndef get_config():\n    config = base.get_config()\n"
    "    config.recovery = 'skip:9'\n    return config\n",
    "lacks": "from configs import base\ndef get_config():\n    config = base.get_config()\n"
    "    del config['seed'], config['mesh_axes']['data']\n    return config\n",
    "group": "from configs import base\ndef get_config():\n    config = base.get_config()\n"
    "    del config['mesh_axes']\n    config.mesh_axes = 3\n    return config\n",
    "sized": "def get_config(size):\n    pass\n",
}


def _write_checkpoint(workdir: Path, meta: dict) -> None:
    with Checkpointer(workdir / "checkpoints", every=1, keep=1, keep_best=0) as checkpointer:
        checkpointer.save(3, {"state": {"a": np.zeros(3)}}, meta, None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files that the rows name."""
    folder = tmp_path_factory.mktemp("bad")
    write_generated_text(folder, documents=400)
    for name, text in CONFIG_FILES.items():
        (folder / f"{name}.py").write_text(text)
    document = '{"text": "a document that is long enough"}\n'
    for name, content in {
        "empty.txt": b"",
        "short.txt": b"abc",
        "bytes.txt": b"\xe9\xfe" * 99,
        "file": b"x",
        "empty.jsonl": b"",
        "cut.jsonl": document.encode() + b'{"text": \n',
        "body.jsonl": b'{"body": "a document that is long enough"}\n',
        "few.jsonl": document.encode() * 3,
        "a.parquet": b"nothing",
        "a.txt.gz": b"nothing",
        "json.json": b'{"a": 1}',
        "text.json": b"text",
    }.items():
        (folder / name).write_bytes(content)
    write_chats(folder / "chats", [*pairs(40), ENDS_WITH_USER])
    shutil.copytree(folder / "chats", folder / "plain")
    (folder / "plain" / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "<s>"}'
    )
    (folder / "chats" / "chats2.jsonl").write_text("\n".join(map(json.dumps, pairs(40))))
    damaged = folder / "damaged"
    _write_checkpoint(damaged, {})
    (damaged / "checkpoints" / "3" / "meta" / "metadata").unlink()
    _write_checkpoint(folder / "version", {"version": 99})
    record = json.loads(base.get_config().to_json()) | {"seed": 7}
    _write_checkpoint(
        folder / "other", {"version": CHECKPOINT_VERSION, "config": record, "data": "x"}
    )
    meta = {"version": CHECKPOINT_VERSION, CONVERTED_FROM: "hf"}
    _write_checkpoint(folder / "converted", meta)
    _write_checkpoint(folder / "imported", meta)
    (folder / "imported" / "config.json").write_text(json.dumps({CONVERTED_FROM: "hf"}))
    for name in ("lines", "no_file", "no_folder"):
        (folder / name).mkdir()
    (folder / "lines" / "metrics.jsonl").write_text('{"step": \n')
    (folder / "no_file" / "metrics.jsonl").mkdir()
    (folder / "no_folder" / "checkpoints").write_text("")
    return folder


@pytest.fixture(scope="module")
def compiled():
    """Seconds of each compilation, as they come."""
    seconds = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, time, **__: seconds.append(time) if "backend_compile" in event else None
    )
    return seconds


@pytest.fixture
def refusal(folder, compiled, tmp_path):
    """A function from flags to the argument of the SystemExit that the program raises."""
    begin = len(compiled)

    def refusal(*given: str) -> object:
        if not any(text.startswith("--config") for text in given):
            given = ("--config=configs/base.py", *SMALL, *given)
        if not any(text.startswith("--workdir") for text in given):
            given = (*given, f"--workdir={tmp_path}/run")
        arguments = []
        for text in given:
            text = text.replace("DIR", str(folder))
            key = re.fullmatch(r"[\w.]+=.*", text, re.DOTALL)
            arguments.append(f"--config.{text}" if key else text)
        with pytest.raises(SystemExit) as ended:
            train(*arguments)
        return ended.value.code

    with command_here("train") as train:
        yield refusal
    assert sum(compiled[begin:]) < 1  # second: nothing but single operations was compiled
    # Nothing was written but the lock.
    assert {path.name for path in tmp_path.rglob("*")} <= {"run", "lock"}


# The rows -----------------------------------------------------------------------------------------

CONFIGS = [
    ("no config", ["--config="], "--config=: there is no file ''"),
    ("missing", ["--config=nowhere.py"], "--config=nowhere.py: there is no file 'nowhere.py'"),
    ("folder", ["--config=configs"], "--config=configs: there is no file"),
    ("name", ["--config=smok"], "there is no file 'smok'; configs by name: .*, smoke, stosignsgd"),
    ("no get_config", ["--config=DIR/empty.py"], "empty.py: the file has no function get_config"),
    ("syntax", ["--config=DIR/syntax.py"], "syntax.py: line 2: SyntaxError: "),
    ("name", ["--config=DIR/name.py"], "name.py: line 2: NameError: name 'confg' is not"),
    ("import", ["--config=DIR/import.py"], "import.py: line 1: ModuleNotFoundError: .*'nowhere'"),
    ("none", ["--config=DIR/none.py"], "get_config must return a ConfigDict, got NoneType"),
    ("dict", ["--config=DIR/dict.py"], "get_config must return a ConfigDict, got dict"),
    (
        "key of a file",
        ["--config=DIR/typo.py"],
        "base.py has no key 'lerning_rate'; did you mean 'optimizer.learning_rate'",
    ),
    ("lacks keys", ["--config=DIR/lacks.py"], "lacks seed: begin with configs.base.get_config"),
    ("no group", ["--config=DIR/group.py"], "mesh_axes must be a group of keys"),
    ("size", ["--config=configs/fp4.py:qwen"], "fp4.py:qwen: size 'qwen' is none of small"),
    ("no sizes", ["--config=configs/smoke.py:small"], "get_config takes no size"),
    ("no size", ["--config=DIR/sized.py"], "get_config needs a size, which follows a colon"),
    (
        "key",
        ["lerning_rate=1"],
        "--config.lerning_rate: configs/base.py has no key 'lerning_rate';"
        " did you mean 'optimizer.l",
    ),
    (
        "key of a group",
        ["model_overrides.d_modl=1"],
        "no key '.*d_modl'; did you mean 'model_overrides.d_model'",
    ),
    ("key of a value", ["mesh.x=1"], "--config.mesh.x: configs/base.py has no key 'mesh.x'"),
    (
        "old key",
        ["valid_every=5"],
        "valid_every: config.valid_every is config.valid.every now",
    ),
    (
        "old key of a file",
        ["--config=DIR/old.py"],
        "config.sample_every is config.sample.every now",
    ),
    (
        "old key that is a group now",
        ["recovery=skip:9"],
        "config.recovery is config.recovery.ladder",
    ),
    (
        "old key that is a group in a file",
        ["--config=DIR/former.py"],
        "former.py: line 4: config.recovery is config.recovery.ladder now",
    ),
    ("key that is gone", ["size_gate=True"], "config.size_gate is gone: docs/benchmarks has the"),
    ("near a key of a group", ["chekpoint_every=5"], "did you mean 'checkpoint.every'"),
    ("no key", ["--config=configs/base.py", "--config.=1"], "--config.: configs/base.py has no k"),
    ("near none", ["zzz=1"], "configs/base.py has no key 'zzz'$"),
    ("key before the config", ["--config.seed=3", "--config=configs/base.py"], "config.seed=3"),
]

FLAGS = [
    ("positional", ["pos"], r"arguments that are not flags: \['pos'\]"),
    ("unknown flag", ["--workdr=x"], "Unknown command line flag 'workdr'. Did you mean: workdir"),
    ("bool", ["--dry_run=maybe"], "flag --dry_run=maybe: .*boolean"),
    ("profile", ["--profile=x"], "profile='x': give the first and last step as A:B"),
    ("profile reversed", ["--profile=5:2"], "profile='5:2': give"),
    ("profile late", ["--profile=5:99"], "profile=5:99 does not lie within the steps 1 to 20"),
    ("profile of nothing", ["--profile=1:2", "--dry_run"], "--dry_run trains nothing: drop one"),
    ("fault", ["--inject=nan@1"], "unknown fault 'nan'.*nan_loss"),
    ("fault without step", ["--inject=nan_loss"], "inject='nan_loss': expected nan_loss@STEP"),
    ("fault at 0", ["--inject=nan_loss@0"], "inject='nan_loss@0': expected"),
    ("int", ["num_steps=abc"], "flag --config.num_steps=abc: .*'abc'"),
    ("int of a float", ["num_steps=1.5"], "flag --config.num_steps=1.5: .*'1.5'"),
    (
        "float",
        ["optimizer.learning_rate=abc"],
        "flag --config.optimizer.learning_rate=abc: .*'abc'",
    ),
    ("no bool", ["document_masking=maybe"], "flag --config.document_masking=maybe: .*boolean"),
    ("no value", ["--config=configs/base.py", "--config.seed"], "--workdir|Missing value"),
    ("tuple", ["gnmr.alpha=(1,"], r"flag --config.gnmr.alpha=\(1,: .* tuple"),
]

WORKDIRS = [
    ("empty workdir", ["--workdir="], "--workdir must have a value"),
    ("workdir file", ["--workdir=DIR/file"], "the workdir .*/file cannot be made: it, or"),
    ("workdir below a file", ["--workdir=DIR/file/run"], "workdir .*/file/run .* is a file"),
    ("workdir not writable", ["--workdir=/proc/run"], "the workdir /proc/run cannot be made: "),
    ("workdir URL", ["--workdir=http://host/run"], "http://host/run: http:// is not read"),
    (
        "damaged",
        ["--workdir=DIR/damaged"],
        "every checkpoint in .*/damaged/checkpoints is damaged: 3: missing: meta/metadata",
    ),
    ("version", ["--workdir=DIR/version"], "has version 99, and this fp8jax reads version"),
    (
        "other config",
        ["--workdir=DIR/other", "--config=configs/base.py", *SMALL[:3]],
        r"comes from another config: .*; seed: 7 -> 0; .*\. Take another --workdir",
    ),
    ("a conversion", ["--workdir=DIR/converted"], "holds weights that were converted from hf, and"),
    ("metrics folder", ["--workdir=DIR/no_file"], "Is a directory: .*metrics.jsonl"),
    ("checkpoints file", ["--workdir=DIR/no_folder"], "no_folder/checkpoints is a file"),
]

# KEY=VALUE, and what the message says besides it.
NUMBERS = [
    *(
        (f"{key}={value}", "must be at least 1")
        for value in (0, -3)
        for key in (
            "num_steps",
            "batch_size",
            "seq_len",
            "grad_accum",
            "unroll",
            "valid.every",
            "valid.batches",
            "sample.every",
            "sample.tokens",
            "checkpoint.every",
            "checkpoint.keep",
        )
    ),
    *(
        (f"{key}={value}", r"does not lie in \[0, 1\)")
        for value in (1.5, 1.0, -0.1, "nan")
        for key in ("optimizer.b1", "optimizer.b2")
    ),
    *(
        (f"{key}={value}", "must be positive and finite")
        for value in (0.0, -1.0, "nan", "inf", 1e39, 1e-40)
        for key in ("optimizer.eps", "optimizer.learning_rate")
    ),
    *(
        (f"{key}={value}", r"does not lie in \[0, 1\]")
        for value in (-0.5, 1.5, "nan")
        for key in ("optimizer.final_fraction", "optimizer.decay_fraction", "gnmr.first")
    ),
    *(
        (f"optimizer.weight_decay={value}", "must be finite and not neg")
        for value in (-1.0, "nan", "inf")
    ),
    *((f"optimizer.clip_norm={value}", "must be positive") for value in (0.0, -1.0, "nan")),
    *((f"valid.fraction={value}", "between 0 and 1") for value in (0.0, 1.0, -1.0, "nan")),
    *((f"data_timeout={value}", "must be positive and at most") for value in (0.0, "nan", "inf")),
    *((f"seed={value}", r"does not lie in \[0, 2\^32\)") for value in (-1, 2**32)),
    *((f"recovery.spike_deviations={value}", "must be positive") for value in (0.0, "nan")),
    *((f"sample.temperature={value}", "must be finite") for value in (-1.0, "nan", "inf")),
    *(
        (f"model_overrides.{key}={value}", "must be positive and")
        for key, value in dict(
            d_model=0, n_layers=-1, norm_eps="nan", rope_theta=-1.0, vocab_size=0
        ).items()
    ),
    ("optimizer.warmup_steps=-1", "is negative"),
    ("checkpoint.keep_best=-1", "is negative"),
    ("recovery.spike_window=7", "must be at least 8"),
    ("gnmr.beta=0.0", "must be positive"),
    ("gnmr.most=0", "must be at least 1"),
    ("gnmr.lock_steps=-1", "must be at least 0"),
    ("gnmr.window=0", "must be at least 1"),
    ("gnmr.random=2.0", r"must lie in \[0, 1\]"),
    ("model_overrides.learned_positions=-1", "is negative"),
    ("unroll=5", "is more than the model's 2 layers"),
]

# The value, and the name that the message suggests.
NAMES = {
    "precision": ("fp8_delayd", "fp8_delayed"),
    "model": ("llama_125", "llama_125m"),
    "precision_schedule": ('((0.9,"bf17"),)', "bf16"),
    "tokenizer": ("byte", "bytes"),
    "optimizer.name": ("adamv", "adam"),
    "optimizer.schedule": ("cosin", "cosine"),
    "optimizer.moments": ("fp9", "fp8"),
    "mesh": ("fdsp", "fsdp"),
    "attention": ("cudn", "cudnn"),
    "backend": ("xna", "xla"),
    "remat": ("ful", "full"),
    "recovery.precision": ("bf17", "bf16"),
    "gnmr.precision": ("bf17", "bf16"),
    "data": ("jsnol:x", "jsonl"),
    "model_overrides.norm": ("rm", "rms"),
    "model_overrides.mlp": ("swigl", "swiglu"),
    "model_overrides.biases": ("qk", "qkv"),
    "model_overrides.rope_scaling": ("yarn_qwen2", "yarn_qwen2.5"),
}

VALUES = [
    ("alpha text", ["gnmr.alpha=abc"], r"gnmr.alpha=\('abc',\) must be one or two positive"),
    ("three alphas", ["gnmr.alpha=1,2,3"], r"gnmr.alpha=\(1, 2, 3\) must be one or two"),
    ("alpha negative", ["gnmr.alpha=-1"], r"gnmr.alpha=\(-1,\) must be one or two positive"),
    (
        "most layers",
        ["gnmr.alpha=1.5", "gnmr.most=3", "precision=fp8_current"],
        "gnmr.most=3 is more than .* 2 layers",
    ),
    ("gnmr of bf16", ["gnmr.alpha=1.5", "precision=bf16"], "precision=bf16 has none: set gnmr.al"),
    ("random without", ["gnmr.random=0.5"], "gnmr.random=0.5 needs a gnmr.alpha: GNMR is off"),
    ("gnmr delayed", ["gnmr.precision=fp8_delayed"], "gnmr.precision='fp8_delayed' uses delayed"),
    (
        "recovery",
        ["recovery.ladder=repeet:5"],
        "ladder='repeet:5': 'repeet' is none of repeat, skip",
    ),
    ("no budget", ["recovery.ladder=repeat"], "recovery.ladder='repeat': repeat needs a budget"),
    ("rung twice", ["recovery.ladder=skip:1,skip:2"], "names a rung twice"),
    ("recovery delayed", ["recovery.precision=fp8_delayed"], "uses delayed scaling"),
    ("option", ["precision=fp8_delayed:histroy=3"], "unknown option 'histroy'; did .* 'history'"),
    ("schedule text", ["precision_schedule=abc"], "'abc' is not a pair"),
    ("schedule late", ['precision_schedule=((1.5,"bf16"),)'], r"stay below 1, got \[0.0, 1.5\]"),
    ("schedule short", ["precision_schedule=((0.9,),)"], r"\(0.9,\) is not a pair"),
    ("devices", ["mesh=fsdp", "batch_size=20"], "batch_size=20 must be a multiple of .* 8 devices"),
    (
        "microbatches",
        ["mesh=fsdp", "grad_accum=4"],
        "batch_size=16 must be .*grad_accum=4 microbatches",
    ),
    ("heads", ["model_overrides.n_heads=3"], "n_heads=3 is not a multiple of n_kv_heads=2"),
    ("heads of a mesh", ["mesh=tensor"], "n_heads=4 does not divide over tensor=8 devices"),
    ("odd head", ["model_overrides.head_dim=15"], "need an even head_dim, got 15"),
    ("mesh", ["mesh_axes.data=3"], "data=3 x fsdp=1 x tensor=1 does not fit 8 devices"),
    ("mesh of 0", ["mesh_axes.data=0"], "mesh axes must be positive"),
    ("fsdp", ["mesh=fsdp", "model_overrides.d_model=60"], "size 60, which is not a multiple"),
    ("positions", ["model=gpt2_tiny", "seq_len=2048"], "seq_len=2048 is more than .*=1024"),
    ("words", ["model_overrides.vocab_size=10"], "vocab_size=10 is less than the tokenizer's 258"),
    ("many layers", ["model_overrides.n_layers=1000000000"], "n_layers=1000000000 is more"),
    ("wide", ["model_overrides.d_model=1000000000000"], "d_model=1000000000000 gives the model"),
    ("a larger one", ["model_overrides.d_ff=1000000000"], "state of llama_tiny would take"),
    ("no model", ["model=hf:DIR/none"], "hf:.*/none does not exist"),
    ("model file", ["model=hf:DIR/file"], "hf:.*/file is not a folder"),
    ("model no folder", ["model=hf:"], "hf: needs a folder: give hf:DIR"),
    ("no config.json", ["model=hf:DIR/lines"], "lines/config.json cannot be read: "),
    ("no weights", ["initial_weights=hf:DIR/none"], "hf:.*/none does not exist"),
    ("weights no run", ["initial_weights=DIR/lines"], "lines has no checkpoints: name the workdir"),
    ("weights of a version", ["initial_weights=DIR/version"], "has version 99, and this fp8jax"),
    ("weights of a dry run", ["initial_weights=DIR/none", "--dry_run"], "none is not a folder: na"),
    ("backend", ["precision=fp8_block", "backend=xla"], "backend 'xla' cannot run recipe"),
    ("attention", ["attention=cudnn"], "attention 'cudnn' cannot run here: it needs an NVIDIA"),
    ("beta", ["attention=stabilized", "attention_beta=-1"], "beta must be above 1"),
    ("beta of xla", ["attention_beta=2.0"], "attention_beta=2.0 .* apply to attention='stabilized"),
    ("prompt", ["sample.prompt=The"], "sample.prompt='The' is for samples: set sample.every"),
    ("long sample", ["sample.every=5"], "sample.tokens=128 is longer than seq_len=64"),
    (
        "keep best",
        ["checkpoint.keep_best=1", "checkpoint.every=5", "valid.every=10"],
        "checkpoint.every=5 must be a multiple of valid.every=10",
    ),
]

DATA = [
    ("no file", ["data=text:DIR/none-*.txt"], "no file matches '.*none-.*', in the source 'text:"),
    ("no data", ["data="], "unknown source ''. There are: python_stdlib, text"),
    ("empty file", ["data=text:DIR/empty.txt"], "'text-empty': its train split does not fill"),
    ("no separator", ["data=text:DIR/short.txt#split="], "#split= needs a separator"),
    ("short file", ["data=text:DIR/short.txt"], "1 documents under 16 bytes"),
    ("not UTF-8", ["data=text:DIR/bytes.txt"], "bytes.txt: it is not UTF-8.*bad_examples=skip"),
    ("no lines", ["data=jsonl:DIR/empty.jsonl"], "It has 0 of 0 documents"),
    ("bad line", ["data=jsonl:DIR/cut.jsonl"], "cut.jsonl, line 2: expected"),
    ("no field", ["data=jsonl:DIR/body.jsonl"], "body.jsonl, line 1: .*KeyError: 'text'"),
    ("few documents", ["data=jsonl:DIR/few.jsonl"], "'jsonl-few': its valid split does not fill"),
    ("Parquet", ["data=parquet:DIR/a.parquet"], "a.parquet: damaged or not Parquet"),
    ("gzip", ["data=text:DIR/a.txt.gz"], "a.txt.gz: damaged or not gzip"),
    ("twice", ["data=a=python_stdlib,a=python_stdlib"], "two sources have the name {'a'}"),
    ("weight", ["data=0*python_stdlib"], "weight '0' in .*: expected a positive decimal"),
    ("chats and text", [CHATS + ",python_stdlib"], r"\(chat-chats\) and text \(python_stdlib\) do"),
    ("chats in bytes", [CHATS], "config.tokenizer is bytes: take bpe:FOLDER/tokenizer.json"),
    ("no template", [CHATS, "tokenizer=bpe:DIR/plain/tokenizer.json"], "has no chat template"),
    ("chats of turn", [CHATS + "#turn"], "expected chat:GLOB or chat:GLOB#turns, got #turn"),
    ("chat's end", [CHATS, TEMPLATE], "chats.jsonl, line 41: the last turn is the user's, it must"),
    ("long chats", [GOOD_CHATS, TEMPLATE, "seq_len=20"], "longer than a row of seq_len=20"),
    ("drop", [CHATS, TEMPLATE, "long_examples=drop"], "unknown long_examples 'drop'"),
    ("drop bad", [CHATS, TEMPLATE, "bad_examples=drop"], "unknown bad_examples 'drop'"),
    ("drop records", ["bad_examples=drop"], "unknown bad_examples 'drop'. There are: error, skip"),
    ("drop text", ["long_examples=skip"], "long_examples='skip' is for conversations"),
    ("unset", ["valid.batches=None"], "valid.batches=None: a command line cannot unset a key"),
    ("no epoch", ["num_epochs=0"], "num_epochs=0 must be at least 1"),
    ("weighted", ["num_epochs=2", "data=2*jsonl:DIR/few.jsonl"], "have weights: remove"),
    ("argument", ["data=python_stdlib:3"], "takes no argument, got '3'"),
    ("long rows", ["seq_len=99999"], "its train split does not fill one row of seq_len=99999"),
    ("cache", ["cache_dir=DIR/file"], "File exists: '.*/file'"),
    ("no path", ["tokenizer=bpe"], "tokenizer bpe needs the path of a tokenizer.json"),
    ("no tokenizer", ["tokenizer=bpe:DIR/none.json"], "none.json cannot be read"),
    ("no JSON", ["tokenizer=bpe:DIR/text.json"], "text.json cannot be read"),
    ("not a tokenizer", ["tokenizer=bpe:DIR/json.json"], "json.json is not a tokenizer"),
]

ROWS = [
    *CONFIGS,
    *FLAGS,
    *WORKDIRS,
    *VALUES,
    *DATA,
    *(
        # A class that is made of a whole group says the names of its fields.
        (
            text,
            [text],
            f"{re.escape(re.sub(r'^(model_overrides|optimizer)[.]', '', text))}.* {message}",
        )
        for text, message in NUMBERS
    ),
    *(
        (f"name of {key}", [f"{key}={value}"], f"unknown .*; did you mean '{near}'")
        for key, (value, near) in NAMES.items()
    ),
]


@pytest.mark.parametrize(
    ("given", "message"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS]
)
def test_bad_command(refusal, given, message):
    line = refusal(*given)
    assert isinstance(line, str) and re.search(f"^error: .*{message}", line), line
    assert "\n" not in line and len(line) <= MAX_LENGTH


def test_there_are_many_rows():
    assert len(ROWS) >= 150


def test_old_keys_of_a_pipeline():
    given = ["--config=configs/infir2/small.py", "--config.cpt.valid_every=3"]
    with pytest.raises(ValueError, match="config.cpt.valid_every is config.cpt.valid.every now"):
        check_config_flags(given, PIPELINE_KEYS)


def test_no_config_is_named(refusal, monkeypatch):
    monkeypatch.setattr(command, "check_config_flags", lambda *_: None)
    line = refusal("--workdir=x", "--configs=x")
    assert line.startswith("error: Unknown command line flag 'configs'")


def test_an_unknown_dataset(refusal, tfds):
    assert re.search("^error: unknown TensorFlow dataset 'nowhere'", refusal("data=tfds:nowhere"))


@pytest.mark.parametrize("weights", ["hf:DIR/none", "DIR/lines", "DIR/version", "DIR/damaged"])
def test_refused_weights_leave_no_workdir(refusal, tmp_path, weights):
    assert refusal(f"initial_weights={weights}").startswith("error: ")
    assert not (tmp_path / "run").exists()


def test_a_refused_conversion_is_left_as_it_is(refusal, folder):
    line = refusal("--workdir=DIR/imported", "initial_weights=hf:DIR/none")
    assert "holds weights that were converted from hf, and no run" in line
    assert sorted(path.name for path in (folder / "imported").iterdir()) == [
        "checkpoints",
        "config.json",
    ]


def test_a_second_program_on_a_workdir(refusal, tmp_path):
    with lock_workdir(tmp_path / "run"):
        line = refusal("seed=1")
    assert re.search(r"^error: another program \(process \d+ on .*\) trains in the workdir", line)
