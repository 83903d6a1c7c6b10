"""Generation with a cache against plain forward passes, and what requests of a batch share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp8jax.device import xla
from fp8jax.gemm.histories.amax_history import HISTORIES
from fp8jax.lm.inference import memory_check
from fp8jax.lm.inference.decoding import NO_TOKEN, Requests, complete, prefill
from fp8jax.lm.inference.generate import Generator, bucket
from fp8jax.lm.inference.sampling import Sampling
from fp8jax.lm.model.cache import empty_cache
from fp8jax.lm.model.freeze import freeze
from fp8jax.lm.model.models import MODELS
from fp8jax.lm.model.prepare import compiler_options, inference_model, prepare
from fp8jax.lm.model.transformer import Transformer
from tests.support.tiny_models import WORDS, tiny_model

GREEDY = Sampling(temperature=0)
PROMPTS = [np.array(ids) for ids in ([3, 1, 4, 1, 5], [9] * 19, [2], [6, 5, 3, 5, 8, 9, 7, 9])]
tiny = functools.cache(tiny_model)


def generator(model, variables, **settings) -> Generator:
    settings = dict(vocab_size=WORDS, max_length=64, unrolled=False) | settings
    return Generator(model, variables, **settings)


@pytest.fixture(scope="module")
def plain():
    """(model, variables, generator) in float32."""
    model, variables = tiny()
    return model, variables, generator(model, variables, cache="fp32")


def require_likeliest(model: Transformer, variables, prompts, texts) -> None:
    """Fails unless each new token is the likeliest after those before it, in one pass over all."""
    rows = [np.concatenate(both) for both in zip(prompts, texts, strict=True)]
    length = max(map(len, rows))
    padded = np.stack([np.pad(row, (0, length - len(row))) for row in rows]).astype(np.int32)
    at = np.broadcast_to(np.arange(length, dtype=np.int32), padded.shape)
    real = at < np.array([[len(row)] for row in rows])
    all_logits = jax.jit(model.apply)(variables, padded, real.astype(np.int32), at)
    for logits, prompt, new in zip(np.asarray(all_logits), prompts, texts, strict=True):
        logits = logits[len(prompt) - 1 :][: len(new), :WORDS]
        best = logits.max(axis=-1)
        # Two sums of a float32 product in different orders: near ties may go either way.
        assert (logits[np.arange(len(new)), new] >= best - 1e-4).all()


@pytest.mark.parametrize(
    "name, unrolled", [("llama_tiny", False), ("gpt2_tiny", True), ("qwen3_tiny", True)]
)
def test_greedy_tokens_with_cache_are_those_without(name, unrolled):
    model, variables = tiny(name)
    new = generator(model, variables, cache="fp32", unrolled=unrolled).generate(PROMPTS, GREEDY, 20)
    assert len({*np.concatenate(new).tolist()}) > 5  # otherwise a constant would do
    assert all(ids.shape == (20,) and ids.dtype == np.int32 for ids in new)
    require_likeliest(model, variables, PROMPTS, new)


@pytest.mark.optimized_too
@pytest.mark.parametrize(
    "policy, cache",
    [
        # Its program has nothing that the other one does not have, but for the type of products.
        pytest.param("bf16", "bf16", marks=pytest.mark.full),
        ("fp8_rowwise", "fp8"),
    ],
)
def test_a_batch_gives_what_each_prompt_gives_alone(policy, cache):
    """Exactly: each token has its own scales. The draws have the request's own key.

    Alone, the short prompts also have fewer rows, less padding and fewer slots.
    """
    generate = generator(*tiny(policy=policy, dtype=jnp.bfloat16), cache=cache).generate
    sampling = Sampling(temperature=0.9, top_k=12, top_p=0.95)
    prompts = PROMPTS[:3]
    together = generate(prompts, sampling, 24)
    assert len({*np.concatenate(together).tolist()}) > 8
    for seed in (0, 2):
        (alone,) = generate([prompts[seed]], sampling, 24, seeds=[seed])
        np.testing.assert_array_equal(alone, together[seed])
    other = generate(prompts, sampling, 24, seeds=[7, 1, 2])
    assert not np.array_equal(other[0], together[0])
    np.testing.assert_array_equal(other[1], together[1])


def first_logits(policy: str, rows: int, positions: int, filler: int):
    """Logits after two prompts in a batch with more rows, positions or other padding."""
    model, variables = tiny("gpt2_tiny", policy, jnp.bfloat16)
    model = inference_model(model)
    prompts = np.full((rows, positions), filler, np.int32)
    lengths = np.zeros(rows, np.int32)
    for row, prompt in enumerate((PROMPTS[0], PROMPTS[3])):
        prompts[row, : len(prompt)], lengths[row] = prompt, len(prompt)
    at = np.tile(np.arange(positions), (rows, 1))
    arguments = (jnp.asarray(x, jnp.int32) for x in (prompts, at < lengths[:, None], at))
    variables = prepare(model, variables, unrolled=False)
    cache = empty_cache(model.config, rows, 32)
    logits, _ = jax.jit(model.apply)(variables, *arguments, cache=cache)
    return [np.asarray(logits[row, : lengths[row]]) for row in (0, 1)]


@pytest.mark.optimized_too
@pytest.mark.parametrize(
    "policy",
    [
        "fp8_current:head=fp8_current",
        # It only has one cast less.
        pytest.param("fp8_current", marks=pytest.mark.full),
    ],
)
def test_padding_raises_no_amax(policy):
    """With biases, padding would not be zero of itself. One scale for a tensor: it would matter."""
    few = first_logits(policy, 2, 8, filler=0)
    many = first_logits(policy, 4, 32, filler=23)
    for ours, theirs in zip(few, many, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    "policy",
    [
        "fp8_delayed:bf16_last=1",
        # tests/lm/model/freeze_test.py shows that the logits are the same.
        pytest.param("nvfp4:bf16_last=1", marks=pytest.mark.full),
    ],
)
def test_frozen_weights_and_exempt_layers_change_no_token(policy):
    """Nor do the layers one by one. Histories are only read."""
    model, variables = tiny(policy=policy, dtype=jnp.bfloat16)
    if HISTORIES in variables:
        full = jax.tree.map(lambda h: np.full(h.shape, 8.0, h.dtype), variables[HISTORIES])
        variables = variables | {HISTORIES: full}
    expected = generator(model, variables).generate(PROMPTS, GREEDY, 12)
    frozen = freeze(model, variables)
    for unrolled in (False, True):
        new = generator(model, frozen, unrolled=unrolled).generate(PROMPTS, GREEDY, 12)
        for ids, theirs in zip(new, expected, strict=True):
            np.testing.assert_array_equal(ids, theirs)


def test_requests_end_at_stop_ids_and_pieces_join(plain):
    generate = plain[2].generate
    whole = generate(PROMPTS, GREEDY, 40)
    stop = int(whole[0][6])
    ended = generate(PROMPTS, GREEDY, 40, stops=[stop])
    for ids, all_ids in zip(ended, whole, strict=True):
        found = np.flatnonzero(all_ids == stop)
        np.testing.assert_array_equal(ids, all_ids[: found[0] + 1] if len(found) else all_ids)
    pieces = list(plain[2].stream(PROMPTS, GREEDY, 40, stops=[stop], every=3))
    assert all(len(ids) <= 3 for piece in pieces for ids in piece) and len(pieces) > 3
    for ids, *streamed in zip(ended, *pieces, strict=True):
        np.testing.assert_array_equal(np.concatenate(streamed), ids)
    # More prompts than a batch takes, and several stops.
    small = generator(plain[0], plain[1], cache="fp32", max_requests=2)
    found = small.generate(PROMPTS, GREEDY, 40, [99, stop], least_length=32)
    for ids, theirs in zip(found, ended, strict=True):
        np.testing.assert_array_equal(ids, theirs)


@pytest.mark.counts_compilations
def test_programs_are_compiled_once_for_each_bucket(plain):
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
    )
    fresh = generator(plain[0], plain[1], cache="fp32")
    fresh.generate(PROMPTS[:3], Sampling(temperature=0.5, top_p=0.5), 8)
    assert compiled
    compiled.clear()
    fresh.generate(PROMPTS[1:], Sampling(temperature=0.7, top_p=0.9), 13, stops=[5])
    assert compiled == []
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 64, 65)] == [1, 1, 2, 4, 4, 8, 64, 128]


def test_one_program_from_prompt_to_text(plain):
    """Training's samples: the tokens of `Generator`, and nothing behind the end."""
    model, variables, generate = plain[0], plain[1], plain[2].generate
    ids = generate(PROMPTS[:1], GREEDY, 10)[0]
    assert NO_TOKEN not in ids
    completed = jax.jit(complete, static_argnums=0, static_argnames="tokens")
    for tokens, stop in ((10, NO_TOKEN), (10, int(ids[3])), (1, NO_TOKEN)):
        requests = Requests(
            keys_B=jax.random.split(jax.random.key(0), 2),
            limits_B=jnp.array([tokens, 0]),  # the second row holds no request
            stops=jnp.array([stop]),
            rule=GREEDY.rule(),
            vocab_size=WORDS,
        )
        arguments = jnp.asarray([PROMPTS[0]] * 2), jnp.array([len(PROMPTS[0])] * 2)
        found, empty = completed(model, variables, *arguments, requests, tokens=tokens)
        end = np.flatnonzero(ids == stop)[0] + 1 if stop in ids else tokens
        assert found.tolist() == [*ids[:end], *[NO_TOKEN] * (tokens - end)]
        assert empty.tolist() == [NO_TOKEN] * tokens


def test_each_token_is_drawn_with_a_key_of_its_own(plain):
    """At a high temperature nearly all of it is chance: one key would give one token again and
    again, 24 tokens of 24 words at random have 15 different ones."""
    (ids,) = plain[2].generate(PROMPTS[:1], Sampling(temperature=100.0), 24)
    assert len(set(ids)) > WORDS // 4


def test_a_prefill_without_requests_is_over(plain):
    model, variables = plain[0], plain[1]
    requests = Requests(
        keys_B=jax.random.split(jax.random.key(0), 2),
        limits_B=jnp.array([0, 3]),
        stops=jnp.array([NO_TOKEN]),
        rule=GREEDY.rule(),
        vocab_size=WORDS,
    )
    state = jax.jit(prefill, static_argnums=0)(
        inference_model(model),
        variables,
        empty_cache(model.config, 2, 8, "fp32"),
        jnp.zeros((2, 4), jnp.int32),
        jnp.array([0, 4]),
        requests,
    )
    assert state.active_B.tolist() == [False, True] and state.lengths_B.tolist() == [0, 4]


@pytest.mark.parametrize(
    "prompts, settings, message",
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {}, "prompt 1 is empty: start it with BOS"),
        ([[1], [1] * 60], {}, "prompt 1 has 60 tokens: with num_tokens=8 .* max_length=64"),
        ([[1, WORDS]], {}, "prompt 0 has ids from 1 to 24: they must be in .0, 24"),
        ([[1]], dict(num_tokens=0), "num_tokens=0 must be at least 1"),
        ([[1]], dict(seeds=[1, 2]), "1 prompts need as many seeds, got 2"),
        ([[1], [2]], dict(seeds=[7, 2**32]), r"seeds from 7 to 4294967296: .* \[0, 4294967296\)"),
        ([[1]], dict(seeds=[-1]), "seeds from -1 to -1"),
    ],
)
def test_bad_requests_raise_in_one_line(plain, prompts, settings, message):
    with pytest.raises(ValueError, match=message) as raised:
        plain[2].generate(prompts, GREEDY, **dict(num_tokens=8) | settings)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            dict(vocab_size=33),
            "vocab_size=33 does not fit the model's vocab_size=32: this tokenizer is not",
        ),
        (dict(max_length=0), "max_length=0 must be at least 1"),
        (dict(max_length=2**31), "max_length=2147483648 must be at most 2147483647"),
        (dict(tokens_per_call=0), "tokens_per_call=0"),
        (dict(cache="fp9"), "unknown KV cache 'fp9'"),
        (dict(max_length=2000), "2000 is more than the model's learned_positions=1024"),
    ],
)
def test_bad_settings_raise_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message):
        generator(*tiny("gpt2_tiny"), **settings)


def test_a_cache_that_exceeds_the_memory_is_refused(plain, monkeypatch):
    """Of 2 layers: keys and values, 2 rows, 2 heads of 8 float32 numbers, 512 bytes a token."""
    generate = generator(*plain[:2], cache="fp32", max_length=2**30 + 8).generate
    with pytest.raises(ValueError, match="2 rows of 1073741832 tokens .* 512.0 GiB"):
        monkeypatch.setattr(memory_check, "capacity", lambda: 512 * 2**30)
        generate([[1] * 8], GREEDY, 2**30)
    monkeypatch.setattr(memory_check, "capacity", lambda: 512 * 32)
    assert len(generate([[1] * 8], GREEDY, 24)[0]) == 24
    with pytest.raises(ValueError, match="lower max_tokens, or generate from fewer or shorter"):
        generate([[1] * 8], GREEDY, 25)


def test_a_stream_checks_its_pieces(plain):
    with pytest.raises(ValueError, match="every=33 must be between 1 and tokens_per_call=32"):
        next(plain[2].stream(PROMPTS, GREEDY, 4, every=33))
    with pytest.raises(ValueError, match="4 prompts are more than max_requests=2"):
        next(generator(plain[0], plain[1], max_requests=2).stream(PROMPTS, GREEDY, 4))


@pytest.mark.parametrize(
    "policy, triton", [("bf16", False), ("fp8_rowwise", False), ("fp8_rowwise:only=fwd_w", True)]
)
def test_programs_of_weights_only_may_widen_codes_inside_gemms(policy, triton, monkeypatch):
    model = Transformer(MODELS["llama_tiny"], policy)
    assert compiler_options(model) == {"xla_allow_excess_precision": False}  # a CPU
    monkeypatch.setattr(xla, "platform", lambda: "gpu")
    options = compiler_options(model)
    assert ("xla_gpu_enable_triton_gemm" in options) == triton
    assert not options["xla_gpu_enable_dynamic_slice_fusion"]  # there is a loop over layers
