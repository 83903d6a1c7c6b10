"""A model of this package for lm-evaluation-harness, without torch.

`HarnessModel` answers the three kinds of requests that the harness's tasks make: log-likelihoods of
continuations, log-likelihoods of whole texts, and generated texts. Rows are padded to a few
lengths, powers of two, and one program is compiled for each.

Needs the package lm_eval: `pip install lm-eval`.
"""

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import lm_eval
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM, TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.inference.generate import SEEDS, Generator
from fp8jax.lm.inference.paired import Estimate, Measured
from fp8jax.lm.inference.sampling import Sampling
from fp8jax.lm.inference.scorer import Scorer
from fp8jax.lm.model.transformer import Transformer
from fp8jax.lookup import brief

SHORTEST = 16  # the least length of a row
_FEWSHOT_SEED = 1234  # the harness's own default

# Options of `GenerationOptions` that are numbers, and their types.
_NUMBERS: dict[str, tuple[type, ...]] = {
    "max_gen_toks": (int,),
    "top_k": (int,),
    "temperature": (int, float),
    "top_p": (int, float),
}

Ids = list[int]
Scored = tuple[float, bool]  # log-likelihood, and whether greedy decoding would give the same


class HarnessModel(TemplateLM):
    """A model and its tokenizer, as the harness sees them.

    Texts that spell special tokens stay text. A context that is longer than the model loses its
    beginning, as with the harness's own models.
    """

    def __init__(
        self,
        model: Transformer,
        variables: Any,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        batch_size: int,
        begin: bool = True,
        stop_ids: Sequence[int] = (),
        seed: int = 0,
    ):
        """Makes a model for the harness; nothing is compiled yet.

        Args:
          variables: parameters, and histories if the policy has delayed scaling.
          max_length: tokens of the longest row.
          batch_size: rows in a batch. Recipes that scale whole tensors by their current amax see
            all of them together, so with such a recipe it changes the numbers slightly.
          begin: whether every text begins with the tokenizer's `bos`, as training documents do.
          stop_ids: ids that end a generated text, besides the tokenizer's `eos`.
          seed: of samples, and of policies that round stochastically.
        """
        super().__init__()
        model.config.check_length(max_length)
        self._model, self._variables, self._tokens = model, variables, tokenizer
        self._max_length, self._batch_size, self._begin = max_length, batch_size, begin
        self._stops, self._seed = sorted({tokenizer.eos, *stop_ids}), seed
        key = jax.random.key(seed) if model.resolved_policy.stochastic else None
        self._scorer = Scorer(model, variables, key)

    @property
    def max_length(self) -> int:
        return self._max_length

    @property
    def eot_token_id(self) -> int:
        return self._tokens.eos

    @property
    def prefix_token_id(self) -> int:
        """Stands before a text without a context."""
        return self._tokens.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> Ids:
        """Returns the ids of a text, after `bos` unless `add_special_tokens` is False."""
        begin = self._begin if add_special_tokens is None else add_special_tokens
        return [self._tokens.bos] * begin + self._tokens.encode(string).tolist()

    def tok_decode(self, tokens: Iterable[int]) -> str:
        return self._tokens.decode(list(tokens))

    # Log-likelihoods ------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Ids, Ids]], **unused: Any
    ) -> list[Scored]:
        rows = [self._row(context, target) for _, context, target in requests]
        answers: list[Scored] = [(0.0, True)] * len(rows)
        buckets: dict[int, list[int]] = defaultdict(list)
        for index, (ids, _) in enumerate(rows):
            buckets[self._bucket(len(ids) - 1)].append(index)
        for length, indices in sorted(buckets.items()):
            for first in range(0, len(indices), self._batch_size):
                chosen = indices[first : first + self._batch_size]
                scored = self._score_rows([rows[i] for i in chosen], length)
                for index, answer in zip(chosen, scored, strict=True):
                    answers[index] = answer
        for (names, _, _), answer in zip(requests, answers, strict=True):
            if names is not None:
                self.cache_hook.add_partial("loglikelihood", names, answer)
        return answers

    def _row(self, context: Ids, target: Ids) -> tuple[Ids, int]:
        """Returns the ids of a row, context first, and how many of them are the target's."""
        if not context or not target:
            raise ValueError(f"a request needs a context and a target, got {context=}, {target=}")
        if len(target) > self._max_length:
            raise ValueError(
                f"a target of {len(target)} tokens is longer than max_length={self._max_length}"
            )
        return (context + target)[-(self._max_length + 1) :], len(target)

    def _bucket(self, length: int) -> int:
        """Returns the length that a row is padded to."""
        bucket = SHORTEST
        while bucket < length:
            bucket *= 2
        return min(bucket, self._max_length)

    def _score_rows(self, rows: Sequence[tuple[Ids, int]], length: int) -> list[Scored]:
        """Returns the scores of the rows, from one batch of them and padding."""
        score = self._scorer.program(self._batch_size, length)
        batch = {
            name: np.zeros((self._batch_size, length), np.int32)
            for name in ("tokens", "targets", "segments", "positions")
        }
        batch["positions"][:] = np.arange(length)
        for i, (ids, _) in enumerate(rows):
            count = len(ids) - 1
            batch["tokens"][i, :count], batch["targets"][i, :count] = ids[:-1], ids[1:]
            batch["segments"][i, :count] = 1
        log_p_BL, best_BL = map(np.asarray, score(*batch.values()))
        answers = []
        for i, (ids, targets) in enumerate(rows):
            own = slice(len(ids) - 1 - targets, len(ids) - 1)
            total = float(log_p_BL[i, own].astype(np.float64).sum())
            answers.append((total, bool(best_BL[i, own].all())))
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-likelihood of each text; long ones are cut into windows."""
        windows: list[tuple[Any, Ids, Ids]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(
                token_list=ids,
                prefix_token=self.prefix_token_id,
                max_seq_len=self._max_length,
                context_len=1,
            ):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (log_p, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += log_p
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # Generation -----------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns a generated text for each request, without the stop string that ended it.

        A request that occurs several times, as for `repeats` of a task, gets other draws each time;
        the same requests in the same order always get the same.

        Raises:
          ValueError: a request has options that are unknown or out of their range.
        """
        groups: dict[GenerationOptions, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[GenerationOptions.parse(request.args[1])].append(index)
        texts = [""] * len(requests)
        for options, indices in groups.items():
            prompts = [self._prompt(requests[i].args[0], options.max_tokens) for i in indices]
            outs = self._generator.generate(
                prompts,
                options.sampling,
                options.max_tokens,
                self._stops,
                seeds=[(self._seed + index) % SEEDS for index in indices],
            )
            for index, ids in zip(indices, outs, strict=True):
                written = ids[:-1] if ids[-1] in self._stops else ids
                texts[index] = options.cut(self.tok_decode(written.tolist()))
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    @functools.cached_property
    def _generator(self) -> Generator:
        cache = "fp32" if self._model.dtype == jnp.float32 else "bf16"  # as the activations
        return Generator(
            self._model,
            self._variables,
            vocab_size=self._tokens.vocab_size,
            max_length=self._max_length,
            max_requests=self._batch_size,
            cache=cache,
        )

    def _prompt(self, context: str, new: int) -> Ids:
        """Returns the ids of a context, of which the last ones fit beside `new` more tokens."""
        most = self._max_length - new
        if most < 1:
            raise ValueError(f"{new} new tokens do not fit max_length={self._max_length}")
        return (self.tok_encode(context) or [self._tokens.bos])[-most:]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How a task wants its texts generated: the harness's `generation_kwargs`.

    Attributes:
      sampling: how tokens are drawn.
      max_tokens: of a text.
      until: texts that end one.
    """

    sampling: Sampling
    max_tokens: int
    until: tuple[str, ...]

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "GenerationOptions":
        """Returns the options of a request; 256 tokens at most if it does not say.

        Raises:
          ValueError: an option is unknown or out of its range.
        """
        known = ("until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p")
        if unknown := sorted(given.keys() - set(known)):
            raise ValueError(f"generation_kwargs has {unknown}; there are {', '.join(known)}")
        options = dict.fromkeys(known) | dict(given)
        until = options["until"] or []
        until = [until] if isinstance(until, str) else until
        if not (isinstance(until, list) and all(isinstance(end, str) for end in until)):
            raise ValueError(f"until must be a text or a list of texts, got {brief(until)}")
        for name, kinds in _NUMBERS.items():
            if options[name] is not None and type(options[name]) not in kinds:
                raise ValueError(f"{name} must be a number, got {brief(options[name])}")
        drawn = bool(options["do_sample"])
        if options["do_sample"] is None:
            drawn = bool(options["temperature"])
        temperature = options["temperature"] if drawn else 0.0
        sampling = Sampling(
            temperature=1.0 if temperature is None else float(temperature),
            top_k=options["top_k"] if drawn else None,
            top_p=options["top_p"] if drawn else None,
        )
        most = options["max_gen_toks"]
        return cls(sampling=sampling, max_tokens=256 if most is None else most, until=tuple(until))

    def cut(self, text: str) -> str:
        """Returns the text before the first of the texts that end it."""
        ends = [text.find(end) for end in self.until if end and end in text]
        return text[: min(ends)] if ends else text


def run_tasks(
    model: LM, tasks: Sequence[ConfigurableTask], *, limit: int | None = None
) -> dict[tuple[str, str], Measured]:
    """Returns what the harness measures, by (task, metric).

    Args:
      limit: rows of each task, the first ones; None for all.

    Raises:
      ValueError: two tasks have the same name, or a request cannot be answered.
    """
    named = {task.config.task: task for task in tasks}
    if len(named) < len(tasks):
        raise ValueError(f"two tasks have the same name: {[task.config.task for task in tasks]}")
    for task in tasks:
        if task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(_FEWSHOT_SEED)
    found = lm_eval.evaluate(lm=model, task_dict=named, limit=limit, bootstrap_iters=1000)
    numbers = {}
    for name, results in found["results"].items():
        samples = found["samples"][name]
        for key, value in results.items():
            metric, comma, filter_name = key.partition(",")
            if comma and not metric.endswith("_stderr"):
                error = results[f"{metric}_stderr,{filter_name}"]
                several = len({sample["filter"] for sample in samples}) > 1
                label = f"{metric} ({filter_name})" if several else metric
                numbers[name, label] = _measured(metric, filter_name, value, error, samples)
    return numbers


def _measured(
    metric: str, filter_name: str, value: float, error: Any, samples: Sequence[dict[str, Any]]
) -> Measured:
    """Returns the harness's own number and error, with the items if it is their mean."""
    estimate = Estimate(float(value), float("nan") if isinstance(error, str) else float(error))
    own = [sample[metric] for sample in samples if sample["filter"] == filter_name]
    if not all(isinstance(item, int | float | np.number) for item in own):
        return Measured(estimate=estimate)
    items = np.array(own, np.float64)
    if not np.isclose(items.mean(), value, rtol=1e-6, atol=1e-9):
        return Measured(estimate=estimate)
    return Measured(estimate=estimate, items=items, weights=np.ones_like(items))
