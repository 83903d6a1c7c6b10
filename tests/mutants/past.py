"""Faults that the library once had, as CHANGELOG.md, docs/results/ and the history tell of them."""

from tests.mutants.mutant import Mutant


def _past(symbol: str, before: str, after: str, why: str) -> Mutant:
    return Mutant(symbol, "past", before, after, why)


PAST = (
    _past(
        "optimizers:_stosign",
        "dict(bound=False) if MOMENTS[c.moments].decays else {}",
        "dict(bound=False)",
        "StoSignSGD's largest magnitude was rounded to nearest, and never decayed",
    ),
    _past(
        "max_combining",
        "return module(**plain, parent=None).init_with_output(*args, **kwargs)",
        "return super().init_with_output(*args, **kwargs)",
        "max_combining changed the initial values of parameters",
    ),
    _past(
        "_cache_key",
        "and devices.size > 1",
        "and not devices.size",
        "programs of several CPU devices were read from the cache, where XLA can abort",
    ),
    _past(
        "names:_split",
        "[(key, options[key]) for key in _ORDER if key in options]",
        "list(options.items())",
        "margin=1,scale=pow2 lost its margin",
    ),
    _past(
        "validate:validate",
        "settings.valid_batches * settings.grad_accum",
        "settings.valid_batches",
        "valid_batches counted microbatches",
    ),
    _past(
        "matmul_xla",
        "_PRECISIONS[accumulation]",
        "None",
        "jax_default_matmul_precision changed the accumulation of FP8 GEMMs",
    ),
    _past(
        "probe:_row",
        "_magnitude(each) * (x != 0) for each",
        "_magnitude(each) for each",
        "telemetry showed the scales of empty tiles",
    ),
    _past(
        "long_examples:_cut",
        "if (shorter := long & ~empty).any():",
        "if (shorter := long & ~empty) is not None:",
        "where all long examples were left out, the log said that 0 were cut",
    ),
    _past(
        "deferred_signals",
        "if signal.getsignal(number) is not signal.SIG_IGN",
        "",
        "a signal that the program was told to ignore was taken",
    ),
    _past(
        "Checkpointer._load",
        "with deferred_signals(), ocp",
        "with ocp",
        "Ctrl-C while Orbax read a checkpoint ended in a long traceback",
    ),
    _past(
        "weights_only_matmul",
        "w.axis == -1 and ",
        "",
        "a square kernel in another layout was multiplied transposed",
    ),
    _past(
        "_model_changes",
        'changes = [f"{model}: {line}" for line in lines]',
        "changes = []",
        "a changed folder was taken without a warning, and the event did not list it",
    ),
    _past(
        "fp8_format:_notes",
        "elif scales is not None and any(recipe.fwd_w for _, recipe in policy.rules):",
        "elif scales is not None:",
        "an export named a grid of runs that cast no weights",
    ),
    _past(
        "ChatTemplate._whole",
        "conversation.require_rendered(rendered.text)",
        "pass",
        "a template that leaves out the calls of tools trained empty turns",
    ),
    _past(
        "summary:_summary",
        "nan_unless(sound, largest)",
        "largest",
        "a history that an optimizer had changed went unnoticed",
    ),
    _past(
        "dequantize",
        'check_result_dtype("dtype", dtype)',
        "pass",
        "dequantize took an integer dtype silently",
    ),
    _past(
        "_checked_amax",
        "if (values < 0).any():",
        "if (values < -1e30).any():",
        "quantize took a negative amax silently",
    ),
    _past(
        "_sum_sorted",
        "preferred_element_type=jnp.float32",
        "preferred_element_type=g_TD.dtype",
        "the embedding's gradient was summed in bfloat16",
    ),
    _past(
        "xla:compiler_options",
        '{"xla_allow_excess_precision": False}',
        "{}",
        "XLA skipped roundings, by the number of devices (docs/results/determinism.md)",
    ),
    _past(
        "write:_save",
        'raise OSError(f"{path} cannot be written: {error}") from error',
        "raise",
        "an export to a full disk ended in a traceback",
    ),
)
