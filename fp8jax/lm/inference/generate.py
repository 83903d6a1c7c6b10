"""Generation: prompts of different lengths in one batch, compiled once for each size of a batch.

    generator = Generator(model, variables, vocab_size=tokenizer.vocab_size, max_length=1024)
    new_ids = generator.generate(prompts, Sampling(temperature=0.8), num_tokens=64, stops=[eos])

Requests, positions of prompts and slots of the cache are padded to powers of two, and each triple
of them compiles one prefill; each pair of requests and slots compiles one decoding. decoding.py
says what one request changes of the results of another.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32, Integer

from fp8jax.device import hardware
from fp8jax.lm.inference.decoding import LEAST_ROWS, NO_TOKEN, Decoding, Requests, decode, prefill
from fp8jax.lm.inference.memory_check import array_bytes, require_memory
from fp8jax.lm.inference.sampling import Sampling
from fp8jax.lm.model.cache import CACHES, empty_cache
from fp8jax.lm.model.prepare import compiler_options, inference_model, prepare
from fp8jax.lm.model.transformer import Transformer
from fp8jax.lookup import lookup

Prompt = Sequence[int | np.integer] | Integer[np.ndarray, " _"]

SEEDS = 2**32  # seeds are below it
MOST_POSITIONS = 2**31 - 1  # which int32 can count

_LEAST_POSITIONS = 16  # of padded prompts; shorter ones would only compile more programs


class Generator:
    """Generates from one model.

    Example:
      >>> from fp8jax.lm.inference.generate import Generator
      >>> from fp8jax.lm.inference.sampling import Sampling
      >>> config = dataclasses.replace(fp8jax.MODELS["llama_tiny"], n_layers=1)
      >>> model = fp8jax.Transformer(config, "fp8_rowwise")
      >>> ids = jnp.zeros((1, 8), jnp.int32)
      >>> variables = jax.jit(model.init)(jax.random.key(0), ids, ids + 1, ids)
      >>> generator = Generator(model, variables, vocab_size=258, max_length=64)
      >>> new = generator.generate([[1, 2, 3], [4]], Sampling(temperature=0), num_tokens=5)
      >>> [ids.shape for ids in new]
      [(5,), (5,)]
    """

    def __init__(
        self,
        model: Transformer,
        variables: Any,
        *,
        vocab_size: int,
        max_length: int,
        cache: str = "bf16",
        max_requests: int = 64,
        tokens_per_call: int = 32,
        unrolled: bool | None = None,
    ) -> None:
        """
        Args:
          variables: parameters, trained or frozen, and amax histories if the policy has any.
          vocab_size: ids below this one may be drawn: the tokenizer's.
          max_length: most tokens of a request, with its prompt; at most `MOST_POSITIONS`.
          cache: a key of `CACHES`, what keys and values are stored in.
          max_requests: the most requests of a batch.
          tokens_per_call: the most new tokens of a call of the device.
          unrolled: whether the layers run one by one and not in a loop, which takes longer to
            compile, and a second copy of the weights while the first one is held, but saves copies
            of weights and cache in each step. None: on GPUs.

        Raises:
          ValueError: a size is out of range, or the cache's name is unknown.
        """
        lookup("KV cache", cache, CACHES)
        if not 1 <= vocab_size <= model.config.vocab_size:
            raise ValueError(
                f"vocab_size={vocab_size} does not fit the model's"
                f" vocab_size={model.config.vocab_size}: this tokenizer is not the model's"
            )
        for name, size in (
            ("max_length", max_length), ("max_requests", max_requests),
            ("tokens_per_call", tokens_per_call),
        ):  # fmt: skip
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        if max_length > MOST_POSITIONS:
            raise ValueError(f"max_length={max_length} must be at most {MOST_POSITIONS}")
        model.config.check_length(max_length)
        self.vocab_size, self.max_length = vocab_size, max_length
        self.max_requests, self.tokens_per_call = max_requests, tokens_per_call
        unrolled = hardware.platform() == "gpu" if unrolled is None else unrolled
        model = inference_model(model)
        self._variables = prepare(model, variables, unrolled=unrolled)
        options = compiler_options(model)

        self._empty = functools.partial(empty_cache, model.config, kind=cache, unrolled=unrolled)

        def prefilled(variables, prompts_BP, lengths_B, requests, slots):
            fresh = self._empty(len(lengths_B), slots)
            return prefill(model, variables, fresh, prompts_BP, lengths_B, requests)

        self._prefill = jax.jit(prefilled, static_argnames="slots", compiler_options=options)
        self._decode = jax.jit(
            functools.partial(decode, model, tokens=tokens_per_call),
            donate_argnames="state", compiler_options=options,
        )  # fmt: skip

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        num_tokens: int,
        stops: Sequence[int] = (),
        *,
        seeds: Sequence[int] | None = None,
        least_length: int = 1,
    ) -> list[Int32[np.ndarray, " _"]]:
        """Returns the new ids of each prompt: up to `num_tokens`, or to its first stop id.

        Args:
          prompts: ids, at least one each, such as BOS; any number of prompts.
          stops: ids that end a request, such as EOS; the ending one is returned.
          seeds: of the draws of each prompt, below `SEEDS`; None for 0, 1, 2, …
          least_length: shorter prompts are padded as prompts of that length are, so that batches of
            different prompts share a program.

        Raises:
          ValueError: a prompt is empty or does not fit, a number is out of its range, or the cache
            would take more than the device's memory.
        """
        seeds = range(len(prompts)) if seeds is None else seeds
        self._check(prompts, num_tokens, seeds)
        found: list[np.ndarray] = []
        for begin in range(0, len(prompts), self.max_requests):
            part = slice(begin, begin + self.max_requests)
            run = self.start(
                prompts[part],
                sampling,
                num_tokens,
                stops,
                seeds=seeds[part],
                least_length=least_length,
            )
            pieces = list(run.pieces(self.tokens_per_call))
            found += [np.concatenate(of_one) for of_one in zip(*pieces, strict=True)]
        return found

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        num_tokens: int,
        stops: Sequence[int] = (),
        *,
        seeds: Sequence[int] | None = None,
        every: int = 4,
    ) -> Iterator[list[Int32[np.ndarray, " _"]]]:
        """Yields the new ids of each prompt, `every` tokens at a time; together, `generate`'s.

        At most `max_requests` prompts.
        """
        yield from self.start(prompts, sampling, num_tokens, stops, seeds=seeds).pieces(every)

    def start(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        num_tokens: int,
        stops: Sequence[int] = (),
        *,
        seeds: Sequence[int] | None = None,
        least_length: int = 1,
    ) -> "Generation":
        """Runs the prompts, and returns what draws the tokens. Arguments as in `generate`.

        At most `max_requests` prompts.
        """
        seeds = range(len(prompts)) if seeds is None else seeds
        self._check(prompts, num_tokens, seeds)
        if len(prompts) > self.max_requests:
            raise ValueError(
                f"{len(prompts)} prompts are more than max_requests={self.max_requests}"
            )
        longest = max(least_length, *map(len, prompts))
        rows = bucket(max(len(prompts), LEAST_ROWS))
        positions = min(bucket(max(longest, _LEAST_POSITIONS)), self.max_length)
        slots = min(bucket(max(longest + num_tokens, positions)), self.max_length)
        require_memory(
            array_bytes(jax.eval_shape(lambda: self._empty(rows, slots))),
            f"a cache of {rows} rows of {slots} tokens",
            "lower max_tokens, or generate from fewer or shorter prompts at a time",
        )
        prompts_BP = np.zeros((rows, positions), np.int32)
        lengths_B, limits_B = np.zeros((2, rows), np.int32)
        for row, prompt in enumerate(prompts):
            prompts_BP[row, : len(prompt)] = prompt
            lengths_B[row], limits_B[row] = len(prompt), num_tokens
        padded = np.array([*seeds, *[0] * (rows - len(prompts))], np.uint32)
        stop_ids = np.array([*stops, *[NO_TOKEN] * (bucket(len(stops)) - len(stops))], np.int32)
        requests = Requests(
            keys_B=jax.vmap(jax.random.key)(padded),
            limits_B=jnp.asarray(limits_B),
            stops=jnp.asarray(stop_ids),
            rule=sampling.rule(),
            vocab_size=self.vocab_size,
        )
        state = self._prefill(self._variables, prompts_BP, lengths_B, requests, slots=slots)
        step = functools.partial(self._decode, self._variables)
        return Generation(step, state, requests, len(prompts), self.tokens_per_call)

    def _check(self, prompts: Sequence[Prompt], num_tokens: int, seeds: Sequence[int]) -> None:
        if num_tokens < 1:
            raise ValueError(f"num_tokens={num_tokens} must be at least 1")
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many seeds, got {len(seeds)}")
        if not prompts:
            raise ValueError("there is no prompt")
        if min(seeds) < 0 or max(seeds) >= SEEDS:
            raise ValueError(
                f"seeds from {min(seeds)} to {max(seeds)}: they must be in [0, {SEEDS})"
            )
        for index, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise ValueError(f"prompt {index} is empty: start it with BOS")
            if len(prompt) + num_tokens > self.max_length:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens: with {num_tokens=} new ones it does "
                    f"not fit the cache of max_length={self.max_length}"
                )
            ids = np.asarray(prompt)
            if ids.min() < 0 or ids.max() >= self.vocab_size:
                raise ValueError(
                    f"prompt {index} has ids from {ids.min()} to {ids.max()}: they must be in [0, "
                    f"{self.vocab_size})"
                )


class Generation:
    """A batch of requests that is being decoded."""

    def __init__(
        self, step: Any, state: Decoding, requests: Requests, count: int, tokens_per_call: int
    ) -> None:
        self._step, self._state, self._requests = step, state, requests
        self._count, self._tokens_per_call = count, tokens_per_call
        self._ended: set[int] = set()

    def pieces(self, every: int) -> Iterator[list[Int32[np.ndarray, " _"]]]:
        """Yields the new ids of each prompt, up to `every` at a time, until all have ended."""
        if not 1 <= every <= self._tokens_per_call:
            raise ValueError(
                f"every={every} must be between 1 and tokens_per_call={self._tokens_per_call}"
            )
        first_B = np.asarray(self._state.newest_B)[: self._count]
        yield [token[None] for token in first_B]
        while self._drop_ended().any():
            self._state, out_BT = self._step(self._state, self._requests, jnp.int32(every))
            out_BT = np.asarray(out_BT)[: self._count]
            yield [
                ids[ids != NO_TOKEN] if row not in self._ended else ids[:0]
                for row, ids in enumerate(out_BT)
            ]

    def end(self, index: int) -> None:
        """Ends a request, for a reason that the device does not know, such as a stop string."""
        self._ended.add(index)

    def _drop_ended(self) -> np.ndarray:
        """Returns which requests go on, after it has told the device which were ended."""
        active_B = np.asarray(self._state.active_B)
        if not self._ended:
            return active_B
        active_B = active_B & ~np.isin(np.arange(len(active_B)), list(self._ended))
        self._state = dataclasses.replace(self._state, active_B=jnp.asarray(active_B))
        return active_B


def bucket(size: int) -> int:
    """Returns the smallest power of two that is not less than `size`; 1 for 0."""
    return 1 << max(size - 1, 0).bit_length()
