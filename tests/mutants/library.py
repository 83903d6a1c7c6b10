"""The list of mutants: 120 faults, spread over the folders of the library by their size, and those
of later code (later.py).

The 120 were written on the code, in functions that a seeded draw weighted by the number of their
statements had named, before it was known which tests find them.
"""

from tests.mutants.later import LATER
from tests.mutants.mutant import Mutant as M

NUMERICS = (
    M(
        "Cast.__post_init__",
        "off by one",
        "if self.hadamard > 1 and self.timing",
        "if self.hadamard > 2 and self.timing",
    ),
    M("Recipe.with_forward", "dropped call", "_replace(fwd=other.accumulation.fwd)", "_replace()"),
    M("check_axis", "off by one", "-ndim <= index < ndim", "-ndim <= index <= ndim"),
    M(
        "quantize_unchecked",
        "dropped call",
        "jnp.isfinite(own) & jnp.isfinite(source)",
        "jnp.isfinite(own)",
    ),
    M("Pow2._exponent", "off by one", "(1 << 23) - 1) >> 23", "(1 << 23)) >> 23"),
    M(
        "butterflies",
        "swapped arguments",
        "parts[i], parts[i + half] = a + b, a - b",
        "parts[i], parts[i + half] = a + b, b - a",
    ),
    M("PrecisionSchedule.policy_of", "comparison", "begin < step", "begin <= step"),
    M(
        "dequantize",
        "dtype",
        "spread(q.scale.astype(jnp.float32),",
        "spread(q.scale.astype(dtype),",
    ),
)

LINEAR = (
    M("updates:join", "dropped call", "check_branch(rest, name)", "pass"),
    M(
        "pallas:_operands",
        "axis",
        "shape[0] if request.axis == -1 else shape[1]",
        "shape[1] if request.axis == -1 else shape[0]",
    ),
    M("contracting_last", "axis", "tile=q.tile[::-1]", "tile=q.tile"),
    M(
        "vjp:_of_shared_x",
        "key",
        "replace(weights[0], histories",
        "replace(weights[-1], histories",
    ),
    M(
        "_reason_against",
        "comparison",
        "device == hardware.device()",
        "device != hardware.device()",
    ),
    M("_quantize_rows", "dropped call", "nan_unless(jnp.isfinite(amax), scale)", "scale"),
    M("check_lax_arguments", "off by one", "len(positional) > 1", "len(positional) > 2"),
    M("vjp:input_gradient", "dtype", "settings.recipe.dgrad_w)", "settings.recipe.fwd_w)"),
    M("self_seeded", "comparison", "summary.largest == 0", "summary.largest >= 0"),
    M("_what_if", "key", "len(CASTS) + CASTS.index(name)", "CASTS.index(name)"),
    M("sum_cotangents", "swapped arguments", "cotangents[::-1]", "cotangents"),
    M("weight:cotangent", "dropped call", "summed_like(dw, varying(weight.value))", "dw"),
    M("shared_amax", "off by one", "len(arrays) < 2", "len(arrays) < 3"),
    M(
        "merge_history",
        "axis",
        "jnp.any(new > 0, axis=-1, keepdims=True)",
        "jnp.any(new > 0, keepdims=True)",
    ),
)

KERNELS = (
    M("_split_heads", "axis", "-1, group, *", "group, -1, *"),
    M(
        "swiglu_quantize:tiles_produced",
        "axis",
        "k if axis == -1 else m, rows",
        "m if axis == -1 else k, rows",
    ),
    M("partition:cast_rows_columns", "axis", 'letters.append("k")', 'letters.append("m")'),
    M("_GradientKV._add_block", "sign", "dp - spread(delta", "dp + spread(delta"),
    M("_GradientQ.run", "dropped call", "(dq * self.p.scale)", "(dq)"),
    M(
        "_store_rows",
        "swapped arguments",
        "scales[0][...] = scale\n",
        "scales[0][...] = reciprocal\n",
    ),
    M("_Forward.run", "sign", "largest + jnp.log(total)", "largest - jnp.log(total)"),
    M("block_gemm:check_operands", "comparison", "m % 8 or n % 64", "m % 8 or n % 8"),
    M(
        "_without_dump_name",
        "dropped call",
        'del attributes["mosaic_gpu.dump_basename"]',
        "pass",
    ),
    M(
        "flash_gradient_q",
        "swapped arguments",
        "(q, k, v, y, dy, lse, begin_BT)",
        "(q, k, v, dy, y, lse, begin_BT)",
    ),
    M(
        "quantize:quantize_tiles",
        "axis",
        "_tile_results(size[::-1], dtype)",
        "_tile_results(size, dtype)",
    ),
)

MODEL = (
    M("_frozen_group", "comparison", "(cast,) if shared else", "(cast,) if not shared else"),
    M("_sum_sorted", "sign", "count_C + ~goes_on_C", "count_C + goes_on_C"),
    M("_sums_before", "off by one", "step *= 2", "step += 1"),
    M(
        "chunked_loss:_forward",
        "dropped call",
        "(1.0 / total) * weights_BL",
        "(1.0 / total) * jnp.ones_like(weights_BL)",
    ),
    M(
        "blockwise_attention:deltas",
        "dropped call",
        "rounded(do_BTKGH.astype(dtype) * out_BTKGH.astype(dtype))",
        "do_BTKGH.astype(dtype) * out_BTKGH.astype(dtype)",
    ),
    M("freeze:freeze", "dtype", "params[name].astype(model.dtype)", "params[name]"),
    M("_blockwise_fwd", "sign", "m + jnp.log(l)", "m - jnp.log(l)"),
    M(
        "Yarn.multipliers",
        "swapped arguments",
        "divided / self.factor + (1 - divided)",
        "divided + (1 - divided) / self.factor",
    ),
    M("Transformer.__call__", "key", "fold_in(key, c.n_layers)", "fold_in(key, 0)"),
    M("Attention.__call__", "comparison", "segments_BL > 0", "segments_BL >= 0"),
    M(
        "attend_cached",
        "axis",
        "cache.key_scales[:, :, None, None, :]",
        "cache.value_scales[:, :, None, None, :]",
    ),
)

OPTIM = (
    M("scale_by_stosign", "off by one", "state.step == 0", "state.step == 1"),
    M("_stochastic_sign", "key", "jax.random.fold_in(key, i) for i", "key for i"),
    M("moments:_encode", "comparison", "if second and fmt.positive", "if fmt.positive"),
    M(
        "moments:stored",
        "key",
        "jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), i)",
        "jax.random.fold_in(jax.random.key(seed), i)",
    ),
    M(
        "scale_by_sign_adam",
        "swapped arguments",
        "bias_correction(new.nu, b2, new.count)",
        "bias_correction(new.nu, b1, new.count)",
    ),
)

STABILITY = (
    M("Ladder.next", "comparison", "spent[name] < budget", "spent[name] <= budget"),
    M(
        "Gnmr.update",
        "key",
        "jax.random.fold_in(jax.random.fold_in(key, 1), steps)",
        "jax.random.fold_in(key, 1)",
    ),
    M("judge", "comparison", "accepted >= detector.window // 2", "accepted > detector.window // 2"),
    M("growing", "off by one", "len(last) <= GROWTHS", "len(last) < GROWTHS"),
)

DATA = (
    M(
        "bpe:_spelling",
        "dropped call",
        'len(token.replace("▁", " ").encode("utf-8"))',
        'len(token.encode("utf-8"))',
    ),
    M("_take_marks", "comparison", "if begin < length", "if begin <= length"),
    M(
        "rows:_row",
        "comparison",
        'np.searchsorted(stream.starts, first, side="right")',
        'np.searchsorted(stream.starts, first, side="left")',
    ),
    M("Tally.skip_record", "dropped call", "self.no_text += 1", "pass"),
    M(
        "count_chats",
        "sign",
        "len(found[split]) - len(kept[split])",
        "len(kept[split]) - len(found[split])",
    ),
    M(
        "_write_source",
        "swapped arguments",
        "[[tokenizer.bos], ids, [tokenizer.eos]]",
        "[[tokenizer.eos], ids, [tokenizer.bos]]",
    ),
    M("examples:_rendered", "off by one", "example.mask[1:].any()", "example.mask.any()"),
    M(
        "_Cycle.counts",
        "off by one",
        "np.searchsorted(places, place)",
        'np.searchsorted(places, place, side="right")',
    ),
    M(
        "ChatTemplate._each_turn",
        "dropped call",
        "rendered.text, rendered.spans[before:]",
        "rendered.text, rendered.spans",
    ),
    M(
        "tokenize_sources",
        "dtype",
        "map_array(tokens, token_dtype(tokenizer))",
        'map_array(tokens, np.dtype("<u4"))',
    ),
    M("_text_corpus", "comparison", 'document_masking or split != "train"', "document_masking"),
    M(
        "mixture:_dataset",
        "key",
        "np.random.SeedSequence([seed, place])",
        "np.random.SeedSequence([place])",
    ),
    M("ExampleRows.epoch", "key", "[*seed, number]", "[*seed]"),
)

RECORDS = (
    M("Checkpointer._prepare", "comparison", "if step > self._tip", "if step >= self._tip"),
    M("find_damage", "dropped call", "listed.keys() if name.startswith(part)", "listed.keys()"),
    M("text_table:aligned", "dropped call", ".rstrip())", ")"),
    M("_whole_lines", "off by one", "start=1", "start=0"),
    M("Checkpointer._ranked", "sign", "(pair[1], -pair[0])", "(pair[1], pair[0])"),
    M("Metrics.__init__", "off by one", "start_step + 1 if start_step else 0", "start_step"),
)

DEVICE = (
    M("batch_axes", "comparison", " or size % _size(mesh, axes)", ""),
    M("xla:compiler_options", "comparison", "not layer_loop", "layer_loop"),
    M("Device.fp8", "comparison", ">= (8, 9)", "> (8, 9)"),
    M("program_bytes", "sign", "- memory.alias_size_in_bytes", "+ memory.alias_size_in_bytes"),
)

INFERENCE = (
    M("complete", "comparison", "requests.limits_B > 0", "requests.limits_B >= 0"),
    M(
        "_judged_in_chunks",
        "dtype",
        "preferred_element_type=jnp.float32",
        "preferred_element_type=x_BLD.dtype",
    ),
    M("final_number", "off by one", "marks[-1]", "marks[0]"),
    M(
        "GenerationOptions.parse",
        "off by one",
        "temperature=1.0 if temperature is None",
        "temperature=0.0 if temperature is None",
    ),
    M(
        "read_texts",
        "swapped arguments",
        "starts.append(length)\n            length += len(piece)",
        "length += len(piece)\n            starts.append(length)",
    ),
    M("_upper_bound", "sign", "> -_NORMAL_95", "> _NORMAL_95"),
    M("measure_accuracy", "axis", "each[-1] in stops", "each[0] in stops"),
    M("problems:_problem", "comparison", "answered != _LEFT_OUT", "answered == _LEFT_OUT"),
    M("_drawn", "key", "(requests.keys_B, drawn_B)", "(requests.keys_B, 0 * drawn_B)"),
)

INTEROP = (
    M(
        "InitialWeights.check",
        "dropped call",
        "self._refuse_other_shapes(theirs)\n            _ = self._files",
        "_ = self._files",
    ),
    M("read:_ranges", "comparison", "number == runs[-1][1] + 1", "number >= runs[-1][1] + 1"),
    M("_export_cast", "comparison", "return cast, cast == own", "return cast, follows"),
    M("export:_quantized", "dtype", "np.dtype(ml_dtypes.bfloat16)", "np.dtype(np.float32)"),
    M("write_tensors", "dtype", "sum(array.nbytes for", "sum(array.size for"),
    M(
        "write:_shards",
        "comparison",
        "size + array.nbytes > max_bytes",
        "size + array.nbytes >= max_bytes",
    ),
    M(
        "_Reader._attention_factor",
        "swapped arguments",
        'self._number("mscale"), self._number("mscale_all_dim")',
        'self._number("mscale_all_dim"), self._number("mscale")',
    ),
    M("end_ids", "comparison", "0 <= token < vocab_size", "0 <= token <= vocab_size"),
)

TELEMETRY = (
    M(
        "StepFiles.__init__",
        "off by one",
        "_steps_after(self._folder, start_step)",
        "_steps_after(self._folder, start_step + 1)",
    ),
    M("_with_peers", "comparison", "len(keys) >= _ENOUGH", "len(keys) > _ENOUGH"),
    M("outliers:_why", "sign", "2**-tensor.delay", "2**tensor.delay"),
    M(
        "summary:summary",
        "dropped call",
        "worse(scalars[tag], value) if tag in scalars else value",
        "value",
    ),
    M(
        "rows:_numbers",
        "swapped arguments",
        '_log2_ratio(peak["scale"], peak["current_scale"])',
        '_log2_ratio(peak["current_scale"], peak["scale"])',
    ),
)

ANALYSIS = (
    M("gemms:_reason", "comparison", "any(size % 16 for", "any(size % 8 for"),
    M("require_fp8", "comparison", "if gemm.reason is not None", "if gemm.reason is None"),
    M(
        "HloProgram._count_runs",
        "dropped call",
        "count += outer.count * (call.trips or 1)",
        "count += call.trips or 1",
    ),
)

FIGURES = (
    M(
        "heat_maps:_edges",
        "swapped arguments",
        "2 * centers[0] - middles[0]",
        "2 * middles[0] - centers[0]",
    ),
    M("promotions", "sign", "(begin - 0.5, end - begin)", "(begin + 0.5, end - begin)"),
    M("grids:grids", "dropped call", "worse(old, number)", "number"),
    M(
        "loss_curves:losses",
        "swapped arguments",
        "gaps(smooth[i], smooth[0])",
        "gaps(smooth[0], smooth[i])",
    ),
    M(
        "number_formats",
        "comparison",
        "values >= 2.0**fmt.min_exponent",
        "values > 2.0**fmt.min_exponent",
    ),
)

TRAINING = (
    M("layer_norms", "dropped call", "jnp.sqrt(sum(squares))", "sum(squares)"),
    M(
        "hooks:decide",
        "dropped call",
        "now.step % settings.valid_every == 0 or last",
        "now.step % settings.valid_every == 0",
    ),
    M("_rows_read", "off by one", "(step - tools.start)", "(step - tools.start + 1)"),
    M("best_of", "comparison", "return min(", "return max("),
    M(
        "InitialState.read",
        "swapped arguments",
        "part.key(run.settings.record, 1)",
        "part.key(run.settings.record, step)",
    ),
    M(
        "check_numbers",
        "swapped arguments",
        "config.checkpoint.every % config.valid.every:",
        "config.valid.every % config.checkpoint.every:",
    ),
    M("validate:validate", "sign", '/ s["bytes"] / math.log(2)', '/ s["bytes"] * math.log(2)'),
    M(
        "carried_histories",
        "comparison",
        "_quantized_layers(after) <= _quantized_layers(before)",
        "_quantized_layers(after) < _quantized_layers(before)",
    ),
    M(
        "Recovery.settle",
        "dropped call",
        "if not (rejection_cause(again) or overflowed(again)):",
        "if True:",
    ),
    M(
        "_microbatch_key",
        "key",
        "jax.random.fold_in(state.key, state.step), index)",
        "jax.random.fold_in(state.key, state.step), 0)",
    ),
    M(
        "_microbatches",
        "axis",
        "x.reshape(-1, grad_accum, *x.shape[1:]).swapaxes(0, 1)",
        "x.reshape(grad_accum, -1, *x.shape[1:])",
    ),
)

TOP = (  # the modules beside the folders
    M(
        "_differentiate",
        "dropped call",
        "variable.set_value(history)\n        return result",
        "pass\n        return result",
    ),
    M("unknown", "comparison", "if similar else", "if not similar else"),
    M(
        "nnx:Fp8DotGeneral.__call__",
        "key",
        "self.recipe.stochastic and key is None",
        "self.recipe.stochastic",
    ),
)

LIBRARY_MUTANTS = (
    *NUMERICS,
    *LINEAR,
    *KERNELS,
    *MODEL,
    *OPTIM,
    *STABILITY,
    *DATA,
    *RECORDS,
    *DEVICE,
    *INFERENCE,
    *INTEROP,
    *TELEMETRY,
    *ANALYSIS,
    *FIGURES,
    *TRAINING,
    *TOP,
    *LATER,
)
