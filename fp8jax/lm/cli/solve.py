"""What a loaded model answers to problems, asked as its own files say."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fp8jax.lm.chat.chat_corpus import DATE
from fp8jax.lm.chat.chat_template import ChatTemplate, load_chat_template
from fp8jax.lm.chat.template import has_template
from fp8jax.lm.inference.accuracy import Accuracy, measure_accuracy
from fp8jax.lm.inference.problems import Problem
from fp8jax.lm.interop.folders import end_ids
from fp8jax.lm.interop.trained import TrainedModel
from fp8jax.lm.model.freeze import freeze


def solve(
    trained: TrainedModel,
    problems: Mapping[str, Sequence[Problem]],
    *,
    max_tokens: int = 256,
    batch_size: int = 128,
) -> dict[str, Accuracy]:
    """Returns the accuracy of a model on each set of problems.

    The prompts are rendered by the chat template of the model's folder, if it has one. Kernels are
    quantized once where the model's policy allows it, with the bits of training's casts.

    Args:
      problems, max_tokens, batch_size: as in `measure_accuracy`.

    Raises:
      ValueError: as `measure_accuracy`, or the model has no tokenizer.
    """
    if trained.tokenizer is None:
        raise ValueError(f"{trained.name} has no tokenizer, which problems need")
    return measure_accuracy(
        trained.model,
        _frozen(trained),
        trained.tokenizer,
        problems,
        template=chat_template(trained),
        max_tokens=max_tokens,
        batch_size=batch_size,
        stop_ids=stop_ids(trained),
        begin=trained.begins_texts,
    )


def stop_ids(trained: TrainedModel) -> list[int]:
    """Returns the ids that end a text by the model's folder, besides the tokenizer's EOS."""
    vocab_size = trained.model.config.vocab_size
    return [] if trained.files is None else end_ids(trained.files, vocab_size)


def chat_template(trained: TrainedModel) -> ChatTemplate | None:
    """Returns the template of the folder that a model's small files are in; None without one.

    Where it writes today's date, it writes that of training.
    """
    if trained.files is None or not has_template(trained.files):
        return None
    return load_chat_template(trained.files, trained.tokenizer, now=DATE)


def turn_ends(trained: TrainedModel) -> tuple[int, ...]:
    """Returns the id that ends the assistant's turns in the run's chats; () if it had none.

    It is often another than the one that ended texts of the model that a run began with.
    """
    if trained.record is None or not re.search(r"(^|[,=*\s])chat:", trained.record["data"]):
        return ()
    template = chat_template(trained)
    return () if template is None else template.turn_ends()


def _frozen(trained: TrainedModel) -> dict[str, Any]:
    """Returns variables whose kernels are quantized once, or as they are if the policy forbids it.

    Weights that are rounded stochastically, and those of Smooth-SwiGLU, are quantized in each step.
    """
    try:
        return freeze(trained.model, trained.variables)
    except ValueError:
        return trained.variables
