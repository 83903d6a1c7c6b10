"""The ten faults that docs/results/test_suite.md planted when the tests were put into folders."""

from tests.mutants.mutant import Mutant


def _planted(symbol: str, before: str, after: str, why: str) -> Mutant:
    return Mutant(symbol, "planted", before, after, why)


PLANTED = (
    _planted(
        "vjp:input_gradient", "dx = named_matmul(", "dx = -named_matmul(", "sign: dgrad negated"
    ),
    _planted(
        "summary:record",
        "newest = jnp.where(jnp.isfinite(amax), amax, summary.newest)",
        "newest = summary.newest",
        "stale scale: the newest amax ignored",
    ),
    _planted(
        "step:accumulate",
        "combine_max(histories, micro_histories)",
        "micro_histories",
        "dropped max: the last microbatch's history wins",
    ),
    _planted(
        "Tile.per_axis",
        "sizes[others[-1]] = self.free",
        "sizes[others[0]] = self.free",
        "wrong axis: tiles along another free axis",
    ),
    _planted(
        "rows:_row",
        "first = index * seq_len",
        "first = index * (seq_len + 1)",
        "off by one in packing",
    ),
    _planted(
        "loop:_report_start",
        "if changes is not None:",
        "if changes is not None and not start:",
        "lost event: resume not written",
    ),
    _planted(
        "tile_amax",
        "x = jnp.pad(x, padding)\n",
        "x = jnp.pad(x, padding)\n    x = jnp.where(jnp.isnan(x), 0, x)\n",
        "swallowed NaN: an amax ignores it",
    ),
    _planted(
        "Linears.keys",
        "fold_in(self.key, MODULES.index(self._path_of(name)))",
        "self.key",
        "wrong key: all casts share one",
    ),
    _planted(
        "_train_in",
        'corpus.train.start(meta["position"])',
        "corpus.train.start(None)",
        "missed resume field: the data's position",
    ),
    _planted(
        "vjp:weight_gradient",
        "value.dtype)",
        "jnp.bfloat16)",
        "wrong dtype: dw rounded to bfloat16",
    ),
)
