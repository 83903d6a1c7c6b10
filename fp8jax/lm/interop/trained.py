"""A model with its weights and its tokenizer, from a run's workdir or a Hugging Face folder."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, SingleDeviceSharding

from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.data.hub import names_folder
from fp8jax.lm.data.tokenizers import begins_texts, for_rows, tokenizer
from fp8jax.lm.data.urls import is_url
from fp8jax.lm.interop.folders import (
    HUGGING_FACE,
    shape_of_model,
    small_file,
    warn_of_unknown_keys,
)
from fp8jax.lm.interop.read import (
    check_tensors,
    dropped_tensors,
    folder_with_weights,
    grouped,
    not_finite,
    open_tensors,
    read_tree,
)
from fp8jax.lm.interop.stored_workdirs import local_workdir
from fp8jax.lm.interop.tensor_names import HEAD
from fp8jax.lm.mesh import tree_shardings
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.transformer import Transformer, abstract_variables
from fp8jax.lm.optim.master_weights import MASTER_WEIGHTS, to_float32
from fp8jax.lm.records.checkpoint import Checkpointer, Restored
from fp8jax.lm.records.run_checkpoint import NAMES, PARAMS, require_version
from fp8jax.nn import HISTORIES
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import Policy
from fp8jax.numerics.schedule import as_schedule

_HISTORIES = "histories"  # name of the checkpoint's item
READ = (PARAMS, _HISTORIES)  # all that is read of a checkpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model that is ready to be applied.

    Attributes:
      model: with the policy that was asked for, or the one that trained the weights. A delayed
        policy without histories of its own in the checkpoint takes current scales instead, and has
        no histories.
      variables: {"params": …}, float32, and `HISTORIES` if the policy has delayed scaling.
      tokenizer: None if the folder has none.
      name: the workdir or folder, for people.
      record: the run's config as JSON has it; None if no run trained the weights.
      data: fingerprint of the run's data; None without a run.
      step: finished steps of the run; 0 without one.
      files: where the small files of a Hugging Face folder are; None if nowhere.
      prefix: what the tensors' names begin with in the folder that the weights come from; None for
        the family's own.
      stored_head: whether that folder stored a tied head, too.

    Example:
      >>> from fp8jax.lm.interop.trained import TrainedModel
      >>> model = fp8jax.Transformer(fp8jax.MODELS["llama_tiny"], "bf16")
      >>> TrainedModel(model=model, variables={}, tokenizer=None, name="mine", record=None).step
      0
    """

    model: Transformer
    variables: dict[str, Any]
    tokenizer: Tokenizer | None
    name: str
    record: dict[str, Any] | None
    data: str | None = None
    step: int = 0
    files: Path | None = None
    prefix: str | None = None
    stored_head: bool = False

    @property
    def begins_texts(self) -> bool:
        """Whether `tokenizer.bos` stands before every text: always for a run, whose documents
        begin with it, or as the tokenizer.json of a folder has it (Llama 3's does, Qwen's not)."""
        assert self.tokenizer is not None
        return self.record is not None or begins_texts(self.tokenizer)


def load_model(
    source: str,
    *,
    precision: str | None = None,
    step: int | None = None,
    mesh: Mesh | None = None,
    backend: str | None = None,
    attention: Any = None,
) -> TrainedModel:
    """Returns the model of a workdir or of a Hugging Face folder, with its weights.

    The optimizer's state is not read.

    Args:
      source: a workdir of a run or of a conversion, `hf:DIR`, or `hf:ORG/NAME[@REVISION]` of the
        hub. A workdir may be a URL, gs://… or s3://….
      precision: a policy; None for the one that trained the weights, bf16 for a folder.
      step: which checkpoint of a workdir; None for the newest sound one.
      mesh: shards the variables as training does; None puts them on the first device.
      backend, attention: of the `Transformer`.

    Returns:
      The model, its weights, its tokenizer and what is known of the run that trained it.

    Raises:
      ValueError: there is no model, it cannot be read, or weights are NaN or infinite; the message
        has the path. A name is unknown, or the policy does not fit the model.
      DamagedError: all checkpoints of a workdir are damaged.

    Example:
      >>> from fp8jax.lm.interop.trained import load_model
      >>> config = fp8jax.base_config()
      >>> config.update(precision="fp8_block", num_steps=1, seq_len=16, batch_size=2)
      >>> config.model_overrides.n_layers = 1
      >>> workdir = tempfile.mkdtemp()
      >>> rows = [np.arange(i, i + 17) for i in range(40)]
      >>> scalars = fp8jax.train_and_evaluate(config, workdir, data=rows)
      >>> trained = load_model(workdir, precision="fp8_rowwise")
      >>> trained.step, trained.model.policy.name, trained.tokenizer.name
      (1, 'fp8_rowwise', 'bytes')
    """
    folder = folder_with_weights(source)
    if folder is not None:
        if step is not None:
            raise ValueError(f"step={step} is for workdirs: {source} has no checkpoints")
        return _load_folder(folder, precision or "bf16", mesh, backend, attention)
    workdir = local_workdir(source, READ, step)
    trained = _load_workdir(workdir, precision, step, mesh, backend, attention)
    return dataclasses.replace(trained, name=source) if is_url(source) else trained


def _load_folder(
    folder: Path, precision: str, mesh: Mesh | None, backend: Any, attention: Any
) -> TrainedModel:
    shape = shape_of_model(f"hf:{folder}", {})
    warn_of_unknown_keys(f"hf:{folder}")
    policy = as_policy(precision)
    text_tokenizer = _check(shape, policy, tokenizer_of_folder(folder), mesh, str(folder))
    _say_current(policy, False, str(folder))
    model, shardings, _ = _model(shape, policy, False, mesh, backend, attention)
    files = open_tensors(folder)
    prefix = check_tensors(files, shape)
    if dropped := dropped_tensors(files, shape):
        logging.info("%s: tensors that are computed, not read: %s", folder, grouped(dropped))
    params = read_tree(files, shape, prefix, shardings["params"], np.float32)
    variables = {"params": params}
    return TrainedModel(
        model=model,
        variables=variables,
        tokenizer=text_tokenizer,
        name=str(folder),
        record=None,
        files=folder,
        prefix=prefix,
        stored_head=shape.tie_embeddings and HEAD in files.shapes,
    )


def _load_workdir(
    workdir: Path,
    precision: str | None,
    step: int | None,
    mesh: Mesh | None,
    backend: Any,
    attention: Any,
) -> TrainedModel:
    with Checkpointer(workdir / "checkpoints", every=1, keep=1, keep_best=0) as checkpointer:
        found, meta = read_record(checkpointer, workdir, step)
        record = meta["config"] if "config" in meta else None
        shape = shape_of_workdir(workdir, record)
        policy, own = _policy(record, found, precision, workdir)
        given = tokenizer_of_workdir(workdir, record)
        text_tokenizer = _check(shape, policy, given, mesh, str(workdir))
        _say_current(policy, own, str(workdir))
        model, shardings, boxed = _model(shape, policy, own, mesh, backend, attention)
        dtype = (
            jnp.float32 if record is None else MASTER_WEIGHTS[record["optimizer"]["master_weights"]]
        )
        items = {PARAMS: _abstract(boxed["params"], shardings["params"], dtype)}
        if own and HISTORIES in boxed:
            items[_HISTORIES] = _abstract(boxed[HISTORIES], shardings[HISTORIES], jnp.float32)
        restored = checkpointer.restore(items, at_most=found, only=READ)
    restored = require_step(restored, found, workdir)
    refuse_not_finite(restored.arrays[PARAMS], workdir)
    variables = {"params": to_float32(restored.arrays[PARAMS])}
    if _HISTORIES in items:
        variables[HISTORIES] = restored.arrays[_HISTORIES]
    return TrainedModel(
        model=model,
        variables=variables,
        tokenizer=text_tokenizer,
        name=str(workdir),
        record=record,
        data=meta["data"] if "data" in meta else None,
        step=found,
        files=workdir / HUGGING_FACE,
        **(meta[NAMES] if NAMES in meta else {}),
    )


def read_record(
    checkpointer: Checkpointer, workdir: Path, step: int | None
) -> tuple[int, dict[str, Any]]:
    """Returns step and meta of the checkpoint `step`, or of the newest sound one.

    Raises:
      ValueError: there is no such checkpoint, it is damaged, or another version wrote it.
      DamagedError: all checkpoints are damaged.
    """
    if not (workdir / "checkpoints").is_dir():
        what = "has no checkpoints" if workdir.is_dir() else "is not a folder"
        raise ValueError(f"{workdir} {what}: name the workdir of a run, or hf:DIR")
    newest = checkpointer.read_meta(at_most=step, only=READ)
    if newest is None or (step is not None and newest[0] != step):
        wanted = "no sound checkpoint" if step is None else f"no sound checkpoint of step {step}"
        raise ValueError(f"{workdir} has {wanted}")
    require_version(*newest)
    return newest


def require_step(restored: Restored | None, step: int, workdir: Path) -> Restored:
    """Returns what was restored of checkpoint `step`; ValueError if it has been removed since its
    record was read."""
    if restored is None or restored.step != step:
        raise ValueError(f"{workdir}: checkpoint {step} was removed while it was read: try again")
    return restored


def refuse_not_finite(params: Any, where: Path | str) -> None:
    """Raises ValueError with the parameters that have NaN or infinities; `where` begins it."""
    sound = jax.device_get(_finite(params))
    damaged = [
        jax.tree_util.keystr(keys, simple=True, separator="/")
        for keys, is_sound in jax.tree_util.tree_leaves_with_path(sound)
        if not is_sound
    ]
    if damaged:
        raise not_finite(where, damaged)


@jax.jit
def _finite(tree: Any) -> Any:
    """Returns for each array whether all of its elements are finite, bool []."""
    return jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), tree)


def shape_of_workdir(workdir: Path, record: Mapping[str, Any] | None) -> ModelConfig:
    """Returns the shape of the model in a workdir, from what lies in the workdir alone."""
    kept = workdir / HUGGING_FACE
    if record is None:
        return shape_of_model(f"hf:{kept}", {})
    name = f"hf:{kept}" if names_folder(record["model"]) else record["model"]
    return shape_of_model(name, record["model_overrides"])


def check_precisions(names: Sequence[str]) -> None:
    """Raises ValueError for a name that means no policy, before anything is loaded."""
    for name in names:
        as_policy(name)


def tokenizer_of_folder(folder: Path) -> Tokenizer | None:
    """Returns the tokenizer of a Hugging Face folder; None if it has none."""
    found = small_file(folder, "tokenizer.json")
    return None if found is None else tokenizer(f"bpe:{found}")


def tokenizer_of_workdir(workdir: Path, record: Mapping[str, Any] | None) -> Tokenizer | None:
    """Returns the tokenizer of a workdir: the run's, or that of the converted folder."""
    if record is not None and record["tokenizer"] == "bytes":
        return tokenizer("bytes")
    if (kept := tokenizer_of_folder(workdir / HUGGING_FACE)) is not None:
        return kept
    return None if record is None else tokenizer(record["tokenizer"])


def _policy(
    record: Mapping[str, Any] | None, step: int, precision: str | None, workdir: Path
) -> tuple[Policy, bool]:
    """Returns the policy, and whether the checkpoint's histories are those of this policy."""
    if record is None:
        return as_policy(precision or "bf16"), False
    trained_in = as_schedule(record["precision"], record["precision_schedule"]).policy_of(
        step, record["num_steps"]
    )
    if precision is None and "size_gate" in record:
        raise ValueError(
            f"{workdir} was trained with size_gate=True, which left some of its linears in BF16:"
            " name a precision"
        )
    policy = trained_in if precision is None else as_policy(precision)
    return policy, policy == trained_in and "size_gate" not in record


def _check(
    shape: ModelConfig,
    policy: Policy,
    text_tokenizer: Tokenizer | None,
    mesh: Mesh | None,
    name: str,
) -> Tokenizer | None:
    """Returns the tokenizer without what the model has no rows for; ValueError if one is wrong."""
    policy.check(shape.modules, shape.n_layers)
    if mesh is not None:
        shape.check_mesh(mesh.shape["tensor"])
    if text_tokenizer is None:
        return None
    text_tokenizer = for_rows(text_tokenizer, shape.vocab_size, name)
    if text_tokenizer.vocab_size > shape.vocab_size:
        raise ValueError(
            f"{name}: vocab_size={shape.vocab_size} of the model is less than the tokenizer's"
            f" {text_tokenizer.vocab_size}"
        )
    return text_tokenizer


def _say_current(policy: Policy, own: bool, name: str) -> None:
    """Warns if a delayed policy takes current scales."""
    if not own and policy.current() != policy:
        logging.warning(
            "%s has no amax histories of %s: its delayed scales are those of the tensors at hand",
            name,
            policy.name,
        )


def _model(
    shape: ModelConfig, policy: Policy, own: bool, mesh: Mesh | None, backend: Any, attention: Any
) -> tuple[Transformer, Any, Any]:
    """Returns the model, the shardings of its variables, and their boxed abstract arrays."""
    model = Transformer(shape, policy if own else policy.current(), backend, attention)
    boxed = abstract_variables(model)
    if mesh is not None:
        return model, tree_shardings(boxed, mesh), boxed
    first = SingleDeviceSharding(jax.devices()[0])
    return model, jax.tree.map(lambda leaf: first, nn.meta.unbox(boxed)), boxed


def _abstract(boxed: Any, shardings: Any, dtype: Any) -> Any:
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding),
        nn.meta.unbox(boxed),
        shardings,
    )
