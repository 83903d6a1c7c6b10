"""Chat templates with the structures of published ones, and a tokenizer for them."""

import json
from pathlib import Path

from tokenizers import AddedToken

from fp8jax.lm.data.bpe import train_bpe

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|head|>",
    "<|body|>",
    "<|turn|>",
    "<s>",
    "</s>",
)

# ChatML: each turn is a header line, the content and an end.
CHATML = """
{%- for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# The same with generation tags; the end of the turn lies within them.
TAGGED = """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# As Llama 3.1: BOS, headers between two special tokens, trimmed contents, a date, tools as JSON.
HEADERS = """
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}
{{- '<|head|>system<|body|>\\n\\nToday Date: ' + date_string + '\\n' }}
{%- if tools is not none %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{{- '<|turn|>' }}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|head|>ipython<|body|>\\n\\n' + message.content | tojson + '<|turn|>' }}
{%- elif message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('only one call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|head|>assistant<|body|>\\n\\n' }}
{{- {'name': call.name, 'parameters': call.arguments} | tojson }}
{{- '<|turn|>' }}
{%- else %}
{{- '<|head|>' + message.role + '<|body|>\\n\\n' + message.content | trim + '<|turn|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|body|>\\n\\n' }}{% endif %}
"""

# As Qwen 3: thinking stays in the turns after the user's last one only.
THINKING = """
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- else %}{% set thought = '' %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > last.user %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""

# As Llama 2: turns of the user in brackets, EOS after the assistant's, no generation prompt.
BRACKETS = """
{%- for message in messages %}
{%- if message.role == 'user' %}{{ bos_token + '[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}
{%- endfor %}
"""


def write_chat_folder(folder: Path, template: object) -> Path:
    """Writes a byte-level tokenizer with the tokens of `SPECIAL`, and a template; returns `folder`.

    "<think>" and "</think>" are added tokens that are not special, as in Qwen 3.
    """
    texts = ["The user says hello, and the assistant answers the question.\n"] * 20
    learned = train_bpe(iter(texts), 280)
    learned.add_special_tokens(list(SPECIAL))
    learned.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    learned.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
