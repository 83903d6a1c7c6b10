"""Logits of Hugging Face's models, to compare ours with: writes tests/support/hf_vectors.json.

    python -m tests.support.hf_vectors

needs torch and transformers, which the tests themselves do not: they need the file, and from here
`weight` and `TOKENS`, which are NumPy. Each model is tiny, in float32 on a CPU, and its weights
come from `weight` by their Hugging Face names. They are large enough that attention is far from
uniform and every part of a layer matters; the epsilon of the norms is large, so that a wrong one
would show.
"""

import json
import zlib
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "hf_vectors.json"
VOCAB, WIDTH, LAYERS, HEADS, HIDDEN, EPSILON = 32, 32, 2, 4, 48, 1e-3
TOKENS = np.random.RandomState(0).randint(0, VOCAB, (2, 20))


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 weights for a parameter, from its Hugging Face name.

    By the generator whose stream NumPy has frozen. Norms are around 1, biases nonzero; a matrix
    maps vectors of size 1 to vectors of size 1.7, and the embedding has size 1.
    """
    draws = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if name.endswith("bias"):
        draws = 0.3 * draws
    elif len(shape) == 1:
        draws = 1 + 0.3 * draws
    elif not name.endswith(("wte.weight", "wpe.weight", "embed_tokens.weight")):
        draws = 0.3 * draws
    return draws.astype(np.float32)


_GPT2 = dict(
    vocab_size=VOCAB,
    n_embd=WIDTH,
    n_layer=LAYERS,
    n_head=HEADS,
    n_inner=HIDDEN,
    n_positions=24,
    layer_norm_epsilon=EPSILON,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
_LLAMA = dict(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    intermediate_size=HIDDEN,
    max_position_embeddings=64,
    rms_norm_eps=EPSILON,
    tie_word_embeddings=False,
    rope_parameters=dict(rope_type="default", rope_theta=1e4),
)


def _scaled(rope_type: str, factor: float, **numbers) -> dict:
    """Llama with heads of 16, for enough wavelengths on both sides of the original length."""
    rope = dict(rope_type=rope_type, rope_theta=1e4, factor=factor, **numbers)
    return _LLAMA | dict(
        head_dim=16, max_position_embeddings=int(64 * factor), rope_parameters=rope
    )


_LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0)
_NO_TOKENS: dict = dict(pad_token_id=None, bos_token_id=None, eos_token_id=None)
_DEFAULT = dict(rope_type="default", rope_theta=1e4)
_LINEAR = dict(rope_type="linear", rope_theta=1e6, factor=4.0)
_YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
MODELS: dict[str, tuple[str, dict]] = {
    "gpt2": ("GPT2", _GPT2 | dict(activation_function="gelu_new")),
    "gpt": ("GPT2", _GPT2 | dict(activation_function="gelu")),
    "llama": ("Llama", _LLAMA),
    "llama_linear": ("Llama", _scaled("linear", 4.0)),
    "llama_llama3": (
        "Llama",
        _scaled("llama3", 8.0, original_max_position_embeddings=64, **_LLAMA3),
    ),
    "llama_yarn": ("Llama", _scaled("yarn", 4.0, original_max_position_embeddings=64)),
    "qwen2": ("Qwen2", _LLAMA | dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", _LLAMA | dict(tie_word_embeddings=True, head_dim=16)),
    # Windows of 5 tokens in rows of 20. No token ends a text or pads a row.
    "qwen3_window": (
        "Qwen3",
        _LLAMA
        | dict(head_dim=16, use_sliding_window=True, sliding_window=5, max_window_layers=1)
        | dict(layer_types=["full_attention", "sliding_attention"]),
    ),
    "mistral": ("Mistral", _LLAMA | dict(sliding_window=5)),
    "smollm3": ("SmolLM3", _LLAMA | _NO_TOKENS | dict(no_rope_layers=[1, 0])),
    "phi3": (
        "Phi3",
        _LLAMA
        | _NO_TOKENS
        | dict(sliding_window=5)
        | dict(rope_parameters=_DEFAULT | dict(partial_rotary_factor=0.5)),
    ),
    "olmo2": ("Olmo2", _LLAMA | _NO_TOKENS),
    "olmo3": (
        "Olmo3",
        _LLAMA
        | _NO_TOKENS
        | dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
        | dict(rope_parameters=dict(full_attention=_YARN, sliding_attention=_DEFAULT)),
    ),
    "gemma3": (
        "Gemma3",
        _LLAMA
        | _NO_TOKENS
        | dict(head_dim=16, query_pre_attn_scalar=24)
        | dict(sliding_window=5, layer_types=["sliding_attention", "full_attention"])
        | dict(rope_parameters=dict(full_attention=_LINEAR, sliding_attention=_DEFAULT)),
    ),
}
# Families whose greedy texts are stored, too: those that have windows or unlike layers, and more.
GREEDY = ("llama", *list(MODELS)[list(MODELS).index("qwen3_window") :])
PROMPT, GENERATED = 8, 12  # tokens of `TOKENS`, and tokens after them: more than a window
# The published scalings, as entries of ROPE_SCALINGS: name -> (theta, head_dim, the release's
# rope_scaling).
SCALINGS: dict[str, tuple[float, int, dict]] = {
    "linear_2": (1e4, 128, dict(rope_type="linear", factor=2.0)),
    "linear_4": (1e4, 128, dict(rope_type="linear", factor=4.0)),
    "llama3.1": (
        5e5,
        128,
        dict(rope_type="llama3", factor=8.0, original_max_position_embeddings=8192, **_LLAMA3),
    ),
    "llama3.2": (
        5e5,
        64,
        dict(rope_type="llama3", factor=32.0, original_max_position_embeddings=8192, **_LLAMA3),
    ),
    "yarn_qwen2.5": (
        1e6,
        128,
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32_768),
    ),
}


def _model(family: str, fields: dict):
    """The model with `weight`s."""
    import torch
    import transformers

    name = f"{family}{'Text' if family == 'Gemma3' else ''}Config"
    config = getattr(transformers, name)(**fields, attn_implementation="eager")
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family}{suffix}")(config).eval().to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied head is not among them
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
    return model


def _logits(family: str, fields: dict) -> list:
    """[2][20][VOCAB]."""
    import torch

    with torch.no_grad():
        return _digits(_model(family, fields)(torch.from_numpy(TOKENS)).logits.numpy())


def _greedy(family: str, fields: dict) -> list:
    """The tokens after each prompt, [2][GENERATED]."""
    import torch

    model = _model(family, fields)
    model.generation_config.eos_token_id = None
    made = model.generate(
        torch.from_numpy(TOKENS[:, :PROMPT]), max_new_tokens=GENERATED, do_sample=False
    )
    return made[:, PROMPT:].tolist()


def _frequencies(theta: float, head_dim: int, scaling: dict) -> dict:
    """What multiplies positions, and what multiplies cos and sin."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters=dict(rope_theta=theta, **scaling),
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    return {
        "theta": theta,
        "head_dim": head_dim,
        "magnitude": magnitude,
        "frequencies": _digits(frequencies.numpy()),
    }


def _digits(a: np.ndarray) -> list:
    """Nine significant digits say which float32 number it is."""
    if a.ndim > 1:
        return [_digits(row) for row in a]
    assert a.dtype == np.float32
    return [float(f"{x:.9g}") for x in a]


def main() -> None:
    import torch
    import transformers

    vectors = {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "logits": {name: _logits(*model) for name, model in MODELS.items()},
        "greedy": {name: _greedy(*MODELS[name]) for name in GREEDY},
        "rope": {name: _frequencies(*scaling) for name, scaling in SCALINGS.items()},
    }
    FILE.write_text(json.dumps(vectors, separators=(",", ":")).replace("]],", "]],\n") + "\n")


if __name__ == "__main__":
    main()
