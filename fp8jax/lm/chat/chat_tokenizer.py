"""A tokenizer of one's own for chats: learned tokens, the special tokens of turns, and a template.

`write_chat_tokenizer` writes files that `load_bpe` and `load_chat_template` read:

    tokenizer.json           what `train_bpe` learned, with a token for each digit
    tokenizer_config.json    which special tokens begin and end a document
    chat_template.jinja      ChatML, as Qwen's models write it

A document ends with the token that ends a turn, as in Qwen's chat models: a model that generates
stops there, after a text as after a turn.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from fp8jax.lm.data.bpe import BEGIN, train_bpe

TURN_BEGIN, TURN_END = "<|im_start|>", "<|im_end|>"
CHAT_TOKENS = (BEGIN, TURN_BEGIN, TURN_END)

_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"  # the files beside it

# The tag `generation` marks what the assistant writes: its words and the token that ends its turn.
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
{%- else %}
{{- message['content'] + '<|im_end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def write_chat_tokenizer(path: Path, documents: Iterator[str], vocab_size: int) -> None:
    """Learns a tokenizer from documents; writes it as `path`, and its other files beside it.

    Raises:
      ValueError: as `train_bpe`.
      FileExistsError: one of the files exists; before anything is learned or written.
    """
    for there in map(path.with_name, (path.name, _CONFIG, _TEMPLATE)):
        if there.exists():
            raise FileExistsError(f"{there} exists and is not overwritten")
    learned = train_bpe(documents, vocab_size, special_tokens=CHAT_TOKENS, single_digits=True)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": TURN_END,
        "clean_up_tokenization_spaces": False,
    }
    for name, text in {
        _CONFIG: json.dumps(config, indent=2) + "\n",
        _TEMPLATE: CHAT_TEMPLATE,
        path.name: learned.to_str(pretty=True),
    }.items():
        with open(path.with_name(name), "x", encoding="utf-8") as file:
            file.write(text)
