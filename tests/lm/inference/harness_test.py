"""Our model class for lm-evaluation-harness: against formulas, the harness's own `hf`, and chance.

lm_eval is an optional extra, so these tests are `extended`. The tasks are tiny and written here.
"""

import json
import string
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("lm_eval", reason="the harness is what is tested; pip install -e '.[eval]'")

import jax.numpy as jnp
from lm_eval.api.instance import Instance
from tokenizers import AddedToken

from fp8jax.lm.data.bpe import train_bpe
from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.inference.generate import SEEDS
from fp8jax.lm.inference.harness import GenerationOptions, HarnessModel, run_tasks
from fp8jax.lm.inference.paired import ratio
from fp8jax.lm.inference.tasks import TaskOptions, read_task
from tests.support import ROOT
from tests.support.bigrams import bigram_model

# What lm_eval and datasets do themselves.
pytestmark = [pytest.mark.extended, pytest.mark.filterwarnings("ignore")]

BYTES = tokenizer("bytes")
LETTERS = string.ascii_lowercase


def requests(kind, *arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("t", i, 1))
        for i, each in enumerate(arguments)
    ]


@pytest.fixture(scope="module")
def alphabet():
    """A model that knows the order of letters, and that ":" is followed by 7, or else by 8."""
    likely = {a: {b: 1e4} for a, b in zip(LETTERS, LETTERS[1:], strict=False)}
    likely |= {":": {" ": 1e9}, " ": {"7": 3e6, "8": 1e6}, "7": {"\n": 1e9}, "8": {"\n": 1e9}}
    model, variables, log_p = bigram_model(likely)
    harness = HarnessModel(model, variables, BYTES, max_length=24, batch_size=4)
    return harness, log_p


def nats(log_p, ids):
    return log_p[ids[:-1], ids[1:]].sum()


def test_log_likelihoods(alphabet):
    harness, log_p = alphabet
    pairs = [("abc", "def"), ("", "xyz"), ("abc ", "q"), ("a" * 40, "bcd"), ("abcdefgh", "ij" * 6)]
    found = harness.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
    for (context, target), (value, greedy) in zip(pairs, found, strict=True):
        if context.endswith(" "):  # the harness gives the space to the target
            context, target = context[:-1], " " + target
        ids = [BYTES.bos, *context.encode(), *target.encode()]
        first = len(ids) - len(target) - 1
        assert value == pytest.approx(nats(log_p, ids[first:]), rel=1e-5)
        each = log_p[ids[first:-1]]
        assert greedy == (each[range(len(each)), ids[first + 1 :]] == each.max(axis=1)).all()
    assert [greedy for _, greedy in found] == [True, True, False, True, False]


def test_rolling_log_likelihoods(alphabet):
    harness, log_p = alphabet
    texts = ["a", LETTERS * 3, "no order here"]
    found = harness.loglikelihood_rolling(
        requests("loglikelihood_rolling", *[(t,) for t in texts]), disable_tqdm=True
    )
    for text, value in zip(texts, found, strict=True):
        # A bigram model needs one token of context, so windows change nothing.
        assert value == pytest.approx(nats(log_p, [BYTES.bos, *text.encode()]), rel=1e-5)


def test_generated_texts(alphabet):
    harness, _ = alphabet
    greedy = {"until": ["\n"], "max_gen_toks": 6}
    contexts = [("abc", greedy), ("one:", greedy), ("a" * 60, greedy | {"until": "d"})]
    found = harness.generate_until(requests("generate_until", *contexts), disable_tqdm=True)
    assert found == ["defghi", " 7", "bc"]
    ended = HarnessModel(
        harness._model,
        harness._variables,
        BYTES,
        max_length=24,
        batch_size=4,
        stop_ids=[ord("g")],
        seed=SEEDS - 1,
    )
    assert ended.generate_until(requests("generate_until", *contexts)) == ["def", " 7", "bc"]
    drawn = {"until": ["\n"], "max_gen_toks": 6, "do_sample": True, "temperature": 1.0}
    many = requests("generate_until", *[("one:", drawn)] * 200)
    first, second = (harness.generate_until(many, disable_tqdm=True) for _ in range(2))
    assert first == second and set(first) == {" 7", " 8"}
    # A binomial of 200 draws with p = 3/4 has a deviation of 6.1.
    assert abs(first.count(" 7") - 150) < 4 * 6.2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_beams": 2}, r"generation_kwargs has \['num_beams'\]; there are until, max_gen"),
        ({"do_sample": True, "temperature": -1.0}, "temperature=-1.0 must be 0, or"),
        ({"until": 5}, "until must be a text or a list of texts, got 5"),
        ({"max_gen_toks": "x"}, "max_gen_toks must be a number, got 'x'"),
        ({"do_sample": True, "temperature": [1]}, r"temperature must be a number, got \[1\]"),
        ({"max_gen_toks": 24}, "24 new tokens do not fit max_length=24"),
    ],
)
def test_refused_generation(alphabet, options, message):
    with pytest.raises(ValueError, match=message):
        alphabet[0].generate_until(requests("generate_until", ("a", options)))


def test_how_options_are_read():
    parse = GenerationOptions.parse
    assert parse({}).max_tokens == 256 and parse({}).sampling.temperature == 0
    assert parse({"temperature": 0.5}).sampling.temperature == 0.5
    assert parse({"do_sample": False, "temperature": 0.5, "top_k": 3}).sampling.temperature == 0
    assert parse({"do_sample": True}).sampling.temperature == 1
    assert parse({"until": ["b", "", "a"]}).cut("xab") == "x"


def test_requests_that_cannot_be_scored(alphabet):
    with pytest.raises(ValueError, match="a target of 25 tokens is longer than max_length=24"):
        alphabet[0].loglikelihood(requests("loglikelihood", ("a", "b" * 25)), disable_tqdm=True)


# Tasks --------------------------------------------------------------------------------------------


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ordered_letters(rng, rows):
    """Four choices of five letters, of which one has the order of the alphabet."""
    made = []
    for _ in range(rows):
        choices = []
        for _ in range(3):
            choices.append("".join(rng.choice(list(LETTERS), 5)))
        gold = int(rng.integers(4))
        begin = int(rng.integers(20))
        choices.insert(gold, LETTERS[begin : begin + 5])
        made.append({"query": "Which?", "choices": choices, "gold": gold})
    return made


def test_shuffled_answer_keys_fall_to_chance(alphabet, tmp_path):
    rng = np.random.default_rng(0)
    rows = ordered_letters(rng, 300)
    keys = rng.permutation([row["gold"] for row in rows])
    shuffled = [row | {"gold": int(key)} for row, key in zip(rows, keys, strict=True)]
    tasks = [
        read_task(str(write(tmp_path / f"{name}.jsonl", each)))
        for name, each in (("right", rows), ("shuffled", shuffled))
    ]
    found = run_tasks(alphabet[0], tasks)
    for metric in ("acc", "acc_norm"):
        assert found["right", metric].estimate.value > 0.95  # 20 points above chance, and more
        chance, error = found["shuffled", metric].estimate
        assert 0.02 < error < 0.03 and abs(chance - 0.25) < 3 * error
        # The harness's error is ours, so that single and paired ones can be compared.
        own = found["shuffled", metric]
        assert own.estimate == pytest.approx(ratio(own.items, own.weights), rel=1e-9)


def test_longer_choices_are_normalized(alphabet, tmp_path):
    # A likely letter each, and more of them: less likely as a whole, more likely a byte.
    row = {"query": "Which?", "choices": ["z", "abcdefg"], "gold": 1}
    task = read_task(str(write(tmp_path / "long.jsonl", [row] * 3)))
    found = run_tasks(alphabet[0], [task])
    assert found["long", "acc"].estimate.value == 0
    assert found["long", "acc_norm"].estimate.value == 1


def test_exact_match_and_samples(alphabet, tmp_path):
    rows = [
        {"query": f"{i} is:", "answer": answer} for i, answer in enumerate(["7", "8", ["1", "7"]])
    ]
    path = write(tmp_path / "answers.jsonl", rows)
    greedy = run_tasks(alphabet[0], [read_task(f"{path}:max_tokens=4")])["answers", "exact_match"]
    assert greedy.items.tolist() == [1, 0, 1]
    drawn = read_task(f"{path}:samples=200,temperature=1,max_tokens=4")
    found = run_tasks(alphabet[0], [drawn], limit=2)["answers", "exact_match"]
    # Shares of 200 draws with p = 3/4 have a deviation of 0.031.
    np.testing.assert_allclose(found.items, [0.75, 0.25], atol=4 * 0.031)
    assert found.estimate == pytest.approx(ratio(found.items, np.ones(2)), rel=1e-9)


def test_shots_precede_the_query(alphabet, tmp_path):
    rows = [{"query": f"{i}:", "answer": str(i)} for i in range(4)]
    task = read_task(f"{write(tmp_path / 'shots.jsonl', rows)}:shots=2,max_tokens=2")
    run_tasks(alphabet[0], [task])
    for row, instance in zip(rows, task.instances, strict=True):
        *shots, query = instance.args[0].split("\n\n")
        assert query == row["query"] and len(shots) == 2
        assert all(shot == f"{shot[0]}: {shot[0]}" and shot[0] != query[0] for shot in shots)


YAML = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: [" abc", " xyx"]
target_delimiter: ""
doc_to_target: label
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_tasks_in_the_harness_s_language(alphabet, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = write(tmp_path / "data.jsonl", [{"question": "Which?", "label": i} for i in (0, 0, 1)])
    (tmp_path / "own.yaml").write_text(YAML.format(data=data))
    found = run_tasks(alphabet[0], [read_task(f"{tmp_path}/own.yaml")])
    assert found["own", "acc"].items.tolist() == [1, 1, 0]


CHOICES = '{"query": "a", "choices": ["b", "c"], "gold": 0}\n'
ANSWER = '{"query": "a", "answer": "b"}\n'
OWN = "dataset_path: json\ndataset_kwargs: {data_files: FOLDER/rows.jsonl}\ndoc_to_text: query\n"
OWN += "doc_to_target: answer\ntest_split: train\n"
CHOICE = "output_type: multiple_choice\n"


@pytest.mark.parametrize(
    "query, choices, delimiter",
    [("is", ["a", "b"], " "), ("is", [" a", "\nb"], ""), ("is\n", ["a", "b"], "")],
)
def test_one_space_stands_before_a_choice(query, choices, delimiter, tmp_path):
    """A second one would be scored as a part of the choice."""
    row = {"query": query, "choices": choices, "gold": 0}
    task = read_task(str(write(tmp_path / "a.jsonl", [row])))
    assert task.config.target_delimiter == delimiter
    requests = task.construct_requests(doc=row, ctx=query)
    assert [each.args for each in requests] == [(query, f"{delimiter}{c}") for c in choices]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", "", "a task is a .jsonl or a .yaml file"),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", ANSWER + "{", "line 2: "),
        ("a.jsonl", "[1]\n", 'line 1: expected {"query": "…", …}, got'),
        ("a.jsonl", '{"query": "a"}\n', "line 1: expected choices, or an answer"),
        ("a.jsonl", CHOICES.replace("0", "2"), "gold must be an index of 2 choices, got 2"),
        ("a.jsonl", CHOICES.replace('"c"', '""'), "choices must be a list of at least two texts"),
        ("a.jsonl", CHOICES.replace('"c"', '" c"'), "some choices begin with white space"),
        ("a.jsonl", CHOICES + ANSWER, "some rows have choices, others an answer"),
        ("a.jsonl", ANSWER.replace('"b"', '"  "'), "line 1: an answer is blank"),
        ("a.jsonl", ANSWER.replace('"b"', '["b", " "]'), "line 1: an answer is blank"),
        ("a.jsonl", ANSWER.replace("b", r"\ud800"), r"line 1: .* '.ud800' .*: surrogates not"),
        ("a.jsonl", "[" * 100_000, "line 1: maximum recursion depth"),
        ("a.jsonl:samples=2,temperature=1", CHOICES, "only shots= fits"),
        ("a.jsonl:samples=2", ANSWER, "samples=2 would be equal at temperature=0"),
        ("a.jsonl:shots=1", ANSWER, "shots=1 needs more rows than 1"),
        ("a.jsonl:shot=1", ANSWER, "unknown option 'shot=1'; there are samples, temperature"),
        ("a.jsonl:shots=x", ANSWER, "'shots=x' must be a number"),
        ("a.jsonl:temperature=nan", ANSWER, "temperature=nan must be at least 0"),
        ("a.yaml", "a: [", "a.yaml: while parsing"),
        ("a.yaml", "- 1", "must hold keys and values"),
        ("a.yaml", "process_docs: !function code.f", "could not determine a constructor"),
        ("a.yaml", "include: other", "include is not supported"),
        ("a.yaml", "dataset_path: org/name", "dataset_path must be one of json, csv"),
        ("a.yaml", "dataset_path: json", "data_files names no file"),
        (
            "a.yaml",
            "{dataset_path: json, dataset_kwargs: {data_files: 'https://x/y.json'}}",
            "which is no local file",
        ),
        ("a.yaml", "{dataset_path: json, dataset_kwargs: 3}", "dataset_kwargs must hold keys and"),
        ("a.yaml", OWN, "output_type must be one of loglikelihood, .*; got None"),
        ("a.yaml", OWN + "output_type: [1]", r"output_type must be .*; got \[1\]"),
        ("a.yaml", OWN + CHOICE + "metric_list: [{metric: nope}]", "unknown metric 'nope'. There"),
        ("a.yaml", OWN + CHOICE + "metric_list: [acc]", "metric_list must list .*, got 'acc'"),
        ("a.yaml", OWN + CHOICE + "metric_list: 3", "metric_list must list metrics, got 3"),
        ("a.yaml", OWN + "generation_kwargs: 3", "generation_kwargs must hold keys and values"),
        (
            "a.yaml",
            OWN + "output_type: generate_until\ngeneration_kwargs: {until: 5}",
            "until must be a text or a list of texts, got 5",
        ),
        ("a.yaml", "\udcff", "a.yaml: 'utf-8' codec can't decode byte 0xff"),
        ("a.yaml:shots=1", "", "write options into the file"),
    ],
)
def test_bad_tasks(tmp_path, monkeypatch, name, content, message):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.jsonl").write_text(ANSWER)
    content = content.replace("FOLDER", str(tmp_path))
    (tmp_path / name.partition(":")[0]).write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        read_task(f"{tmp_path}/{name}")


def test_a_missing_file(tmp_path):
    with pytest.raises(OSError, match="nowhere.jsonl"):
        read_task(f"{tmp_path}/nowhere.jsonl")


def test_two_tasks_of_one_name(alphabet, tmp_path):
    tasks = [read_task(str(write(tmp_path / "a.jsonl", [json.loads(ANSWER)]))) for _ in range(2)]
    with pytest.raises(ValueError, match="two tasks have the same name"):
        run_tasks(alphabet[0], tasks)


def test_defaults_of_options():
    assert TaskOptions.parse("") == TaskOptions()
    assert TaskOptions.parse("samples=3,temperature=0.5") == TaskOptions(samples=3, temperature=0.5)


def test_torch_is_not_needed(tmp_path):
    path = write(tmp_path / "task.jsonl", [json.loads(CHOICES), json.loads(CHOICES)])
    program = f"""
import os, sys, warnings
os.environ["USE_TORCH"] = "0"  # datasets would look for the installed distribution
warnings.simplefilter("ignore")
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.inference.harness import HarnessModel, run_tasks
from fp8jax.lm.inference.tasks import read_task
from tests.support.bigrams import bigram_model
model, variables, _ = bigram_model({{"b": {{"c": 9.0}}}})
harness = HarnessModel(model, variables, tokenizer("bytes"), max_length=32, batch_size=2)
print(sorted(run_tasks(harness, [read_task({str(path)!r})])))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[('task', 'acc'), ('task', 'acc_norm')]"


# The harness's own model --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "with_bos"])
def folder(request, tmp_path_factory):
    """A random Llama with a tokenizer that does, or does not, put BOS before a text."""
    torch = pytest.importorskip("torch", reason="the peer runs in it")
    transformers = pytest.importorskip("transformers", reason="it writes the checkpoint")
    folder = tmp_path_factory.mktemp("llama")
    texts = ["The quick brown fox jumps over the lazy dog. "] * 20
    learned = train_bpe(iter(texts), 290)
    learned.add_special_tokens([AddedToken("<|begin_of_text|>", special=True)])
    if request.param:
        from tokenizers.processors import TemplateProcessing

        learned.post_processor = TemplateProcessing(
            single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
        )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=learned, bos_token="<|begin_of_text|>", eos_token="<|end_of_text|>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=290,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_against_the_harness_s_own_model(folder, tmp_path):
    """In float32, log-likelihoods to 1e-4 of their size, and the same accuracies and texts."""
    from lm_eval.models.huggingface import HFLM

    from fp8jax.lm.interop.trained import load_model

    trained = load_model(f"hf:{folder}")
    model = trained.model.clone(dtype=jnp.float32, attention="xla")
    ours = HarnessModel(
        model,
        trained.variables,
        trained.tokenizer,
        max_length=64,
        batch_size=4,
        begin=trained.begins_texts,
    )
    theirs = HFLM(
        pretrained=str(folder), device="cpu", batch_size=4, dtype="float32", max_length=64
    )
    pairs = [
        ("The quick", " brown fox"),
        ("", "The lazy"),
        ("dog ", "jumps"),
        ("a" * 90, " over"),
        ("Füße 数学", " 🙂."),
        ("The quick brown fox jumps", " over the lazy dog."),
    ]
    found, expected = (
        lm.loglikelihood(requests("loglikelihood", *pairs), disable_tqdm=True)
        for lm in (ours, theirs)
    )
    np.testing.assert_allclose([v for v, _ in found], [v for v, _ in expected], rtol=1e-4)
    assert [g for _, g in found] == [g for _, g in expected]
    if not trained.begins_texts:  # theirs predicts BOS after BOS, where it writes one
        texts = requests("loglikelihood_rolling", ("a quick fox " * 30,), ("x",))
        found, expected = (lm.loglikelihood_rolling(texts) for lm in (ours, theirs))
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    prompts = requests("generate_until", *[(text, options) for text in ("The quick", "a b")])
    found, expected = (lm.generate_until(prompts) for lm in (ours, theirs))
    assert found == expected
    rows = [
        {"query": a, "choices": [b.strip(), "cat", "dog is lazy"], "gold": i % 3}
        for i, (a, b) in enumerate(pairs)
        if a
    ]
    path = write(tmp_path / "choices.jsonl", rows)
    found, expected = (run_tasks(lm, [read_task(str(path))]) for lm in (ours, theirs))
    for key in found:
        assert found[key].items.tolist() == expected[key].items.tolist()
