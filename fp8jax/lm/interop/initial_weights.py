"""Weights that a run starts with: those of a Hugging Face folder or of another workdir."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging

from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.data.hub import as_folder
from fp8jax.lm.data.tokenizers import difference
from fp8jax.lm.interop.folders import shape_of_model
from fp8jax.lm.interop.read import (
    TensorReader,
    check_tensors,
    folder_with_weights,
    open_tensors,
    read_tree,
)
from fp8jax.lm.interop.stored_workdirs import local_workdir
from fp8jax.lm.interop.tensor_names import parameter_shapes
from fp8jax.lm.interop.trained import (
    READ,
    read_record,
    refuse_not_finite,
    require_step,
    shape_of_workdir,
    tokenizer_of_folder,
    tokenizer_of_workdir,
)
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.optim.master_weights import MASTER_WEIGHTS
from fp8jax.lm.records.checkpoint import Checkpointer
from fp8jax.lm.records.run_checkpoint import PARAMS


@dataclasses.dataclass(frozen=True)
class InitialWeights:
    """The weights of `source`, for a model of one's own.

    Attributes:
      source: `hf:DIR`, or the workdir of a run or of a conversion: its newest sound checkpoint.
        The workdir may be a URL.
      model: the shape of the model that takes them.
    """

    source: str
    model: ModelConfig

    def check(self, text_tokenizer: Tokenizer | None = None) -> None:
        """Looks at shapes, and warns of what is not as in the source: fields of the model, and ids
        of the tokenizer, if it is given, that stand for other text.

        Raises:
          ValueError: there are no weights, or they are damaged or of another model; with all
            tensors that do not fit.
          DamagedError: all checkpoints of the workdir are damaged.
        """
        folder = as_folder(self.source)
        if folder is not None:
            theirs, record = shape_of_model(self.source, {}), None
            self._refuse_other_shapes(theirs)
            _ = self._files  # which checks them
        else:
            with self._checkpointer() as checkpointer:
                _, meta = read_record(checkpointer, self._workdir, None)
            record = meta["config"] if "config" in meta else None
            theirs = shape_of_workdir(self._workdir, record)
            self._refuse_other_shapes(theirs)
        if text_tokenizer is not None:
            self._warn_of_other_ids(text_tokenizer, record)
        fields = dataclasses.asdict(theirs)
        others = {
            name: value
            for name, value in dataclasses.asdict(self.model).items()
            if value != fields[name]
        }
        if others:
            changed = ", ".join(
                f"{name}: {fields[name]} -> {other}" for name, other in others.items()
            )
            logging.warning("this model differs from that of %s: %s", self.source, changed)

    def _warn_of_other_ids(self, ours: Tokenizer, record: dict[str, Any] | None) -> None:
        folder = as_folder(self.source)
        try:
            theirs = (
                tokenizer_of_workdir(self._workdir, record)
                if folder is None
                else tokenizer_of_folder(folder)
            )
        except ValueError as error:  # a folder may have any; its weights can be used without it
            logging.warning("ids of %s cannot be compared: %s", self.source, error)
            return
        if theirs is not None and (other := difference(ours, theirs)):
            logging.warning(
                "the weights of %s were trained with another tokenizer, whose ids mean other text:"
                " %s",
                self.source,
                other,
            )

    def read(self, abstract: Any) -> Any:
        """Returns the parameters, with the dtypes and shardings of a tree of abstract ones.

        Raises ValueError and DamagedError as `check` does; ValueError for NaN and infinities.
        """
        if as_folder(self.source) is not None:
            files, prefix, theirs = self._files
            shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
            (dtype,) = {leaf.dtype for leaf in jax.tree.leaves(abstract)}
            return read_tree(files, theirs, prefix, shardings, dtype)
        with self._checkpointer() as checkpointer:
            step, meta = read_record(checkpointer, self._workdir, None)
            stored = (
                "float32" if "config" not in meta else meta["config"]["optimizer"]["master_weights"]
            )
            items = {PARAMS: _with_dtype(abstract, MASTER_WEIGHTS[stored])}
            restored = checkpointer.restore(items, at_most=step, only=(PARAMS,))
        restored = require_step(restored, step, self._workdir)
        refuse_not_finite(restored.arrays[PARAMS], self._workdir)
        return jax.tree.map(
            lambda leaf, to: leaf.astype(to.dtype), restored.arrays[PARAMS], abstract
        )

    def _refuse_other_shapes(self, theirs: ModelConfig) -> None:
        what = f"initial_weights={self.source} are those of another model"
        refuse_other_shapes(what, theirs, self.model)

    def _checkpointer(self) -> Checkpointer:
        return Checkpointer(self._workdir / "checkpoints", every=1, keep=1, keep_best=0)

    @functools.cached_property
    def _workdir(self) -> Path:
        return local_workdir(self.source, READ)

    @functools.cached_property
    def _files(self) -> tuple[TensorReader, str, ModelConfig]:
        """The folder's tensors, what their names begin with, and its own model, which decides the
        names: they may join linears that this model's do not."""
        folder = folder_with_weights(self.source)
        assert folder is not None
        files, theirs = open_tensors(folder), shape_of_model(self.source, {})
        return files, check_tensors(files, theirs), theirs


def refuse_other_shapes(what: str, theirs: ModelConfig, ours: ModelConfig) -> None:
    """Raises ValueError, `what` and all parameters of two models that differ."""
    expected, found = parameter_shapes(ours), parameter_shapes(theirs)
    problems = [
        f"{path}: {found[path] if path in found else 'missing'} instead of "
        f"{expected[path] if path in expected else 'nothing'}"
        for path in {**expected, **found}
        if path not in found or path not in expected or found[path] != expected[path]
    ]
    if problems:
        raise ValueError(f"{what}: {'; '.join(problems)}")


def _with_dtype(abstract: Any, dtype: jnp.dtype) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding), abstract
    )
