"""The paths of the linears of a decoder, which the patterns of policies match."""

# A linear's place in this tuple is folded into its random key for stochastic rounding, so the order
# must not change.
MODULES = (
    "layers/attention/q",
    "layers/attention/k",
    "layers/attention/v",
    "layers/attention/o",
    "layers/mlp/gate",
    "layers/mlp/up",
    "layers/mlp/down",
    "lm_head",
)
