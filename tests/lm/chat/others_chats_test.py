"""Conversations of other people: trained as they are, or refused by a line that says what is wrong.

Each row is a fault that public bug reports name, on an input of our own.
"""

import datetime
import functools
import json

import pytest
from tokenizers import AddedToken

from fp8jax.lm.chat import sandbox
from fp8jax.lm.chat.chat_template import load_chat_template
from fp8jax.lm.chat.conversation import read_chats
from fp8jax.lm.data.bpe import load_bpe, train_bpe
from tests.support.chat_templates import BRACKETS, CHATML, HEADERS, TAGGED, THINKING
from tests.support.messages import assistant, system, user

NOON = datetime.datetime(2026, 7, 26, 12)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|head|>", "<|body|>", "<|turn|>", "<s>", "</s>")
ROLES = ("<｜User｜>", "<｜Assistant｜>")  # added tokens that are not special
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def call(arguments, **others):
    return {"type": "function", "function": {"name": "rain", "arguments": arguments}, **others}


def calls(arguments, content="", **others):
    """A question, a call and its result, and the answer."""
    asked = assistant(content, tool_calls=[call(arguments, **others)])
    return [user("Rain?"), asked, {"role": "tool", "content": "no"}, assistant("Dry.")]


def deep(levels):
    """Lists within each other."""
    return functools.reduce(lambda inner, _: [inner], range(levels), 1)


TOOL = {
    "type": "function",
    "function": {
        "name": "rain",
        "description": "Whether it rains.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

# Templates with the structures of published ones ------------------------------------------------


def chatml(body, before=""):
    """ChatML whose messages have some body, and whose text has something before them."""
    return (
        before + "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}" + body + "{{- "
        "'<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )


CONTENT = "{{- m.content or '' }}"
EACH_CALL = "{%- for c in m.tool_calls or [] %}<tool_call>\n{{- "
CALLING = chatml(CONTENT + EACH_CALL + "c.function | tojson }}</tool_call>{% endfor %}")
FLAT = chatml(CONTENT + EACH_CALL + "c.arguments | tojson }}{{ c.name }}{% endfor %}")
JOINS = chatml(CONTENT + EACH_CALL + "c.function.name + ' ' + c.function.arguments }}{% endfor %}")
PRINTS = chatml(CONTENT + EACH_CALL + "c.function.name }} {{ c.function.arguments }}{% endfor %}")
QUOTES = chatml(
    CONTENT + EACH_CALL + "(c.function.arguments + '') | tojson }}{{ c.function.name }}{% endfor %}"
)
ONLY_NAMES = chatml(CONTENT + EACH_CALL + "c.function.name }}{% endfor %}")
ADDS = CALLING.replace("m.content or ''", "m.content + ''")
SAYS_NONE = CALLING.replace("m.content or ''", "m.content")
NEEDS_NULL = chatml(
    "{%- if m.content is none %}" + EACH_CALL + "c.function | tojson }}{% endfor %}"
    "{%- else %}{{- m.content }}{%- endif %}"
)
COUNTS = CALLING.replace(
    "{%- for c",
    "{%- if 'tool_calls' in m and m.tool_calls|length > 1 %}"
    "{{ raise_exception('one call') }}{% endif %}{%- for c",
)
TOOLS = chatml(
    CONTENT,
    "{%- if tools is not none %}{% for t in tools %}{{- t | tojson }}{% endfor %}{% endif %}",
)
ONLY_TOOL_NAMES = TOOLS.replace("t | tojson", "t.function.name")
REASONING = chatml(
    "{%- if m.reasoning_content %}<think>{{- m.reasoning_content }}</think>{% endif %}" + CONTENT
)
KNOWN_ROLES = chatml(
    "{%- if m.role in ('system', 'user', 'assistant') %}" + CONTENT + "{% endif %}"
)
FIRST_SYSTEM = chatml("{%- if m.role != 'system' or loop.first %}" + CONTENT + "{% endif %}")
LAST_LINE = chatml("{{- m.content.split('\\n')[-1] }}")
NO_THINKING = chatml("{{- m.content.split('</think>')[-1] }}")
ROLE_TOKENS = (
    "{%- for m in messages %}{{- '<｜' + m.role | capitalize + '｜>' + m.content }}"
    "{%- if m.role == 'assistant' %}{{- '</s>' }}{% endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"
)
TAGGED_ROLES = TAGGED.replace(
    "message['content'] + '<|im_end|>' }}{% endg", "message['content'] }}{{ '<|im_end|>' }}{% endg"
)
LOOP = "{%- for i in range(99999) %}{%- for j in range(99999) %}{% endfor %}{% endfor %}"
RECURSION = (
    "{%- macro f(n) %}{% if n %}{{- f(n - 1) + f(n - 1) }}{% endif %}{% endmacro %}{{- f(64) }}"
)
DOUBLES = "{%- set n = namespace(s='ab') %}{%- for i in range(64) %}{%- set n.s = n.s ~ n.s %}"
DOUBLES += "{%- endfor %}"
BLOCKS = "{%- set s = 'ab' %}" + "{%- set s %}{{ s }}{{ s }}{% endset %}" * 64


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function from a template, or several with names, to the `ChatTemplate` of a folder."""
    folder = tmp_path_factory.mktemp("others")
    learned = train_bpe(iter(["The user asks and the assistant answers, no rain.\n"] * 20), 280)
    learned.add_special_tokens(list(SPECIAL))
    learned.add_tokens([AddedToken(token, normalized=False) for token in ROLES + TAGS])
    learned.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    bpe = load_bpe(folder / "tokenizer.json")

    def load(template):
        made = config | {"chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(made))
        return load_chat_template(folder, bpe, now=NOON)

    return load


def trained(example):
    return [example.text[begin:end] for begin, end in example.spans]


def tokens(template, example, what):
    """How often a token is in the ids, and how often text spells it."""
    index = template.backend.token_to_id(what)
    return example.ids.tolist().count(index), example.text.count(what)


# Trained as they are ----------------------------------------------------------------------------

JSON_CALL = '<tool_call>{"name": "rain", "arguments": {"city": "Oslo"}}</tool_call><|im_end|>'
DRY = "Dry.<|im_end|>"
INSIDE = "{%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
GREETING = [user("a"), assistant("b")], ["b<|im_end|>"]

RIGHT = [
    # Arguments as servers render them, whatever the file's spelling is.
    ("a dict", CALLING, calls({"city": "Oslo"}), [JSON_CALL, DRY]),
    ("a string", CALLING, calls('{"city":"Oslo"}'), [JSON_CALL, DRY]),
    ("non-ASCII", CALLING, calls('{"city": "\\u00c5s"}'), [JSON_CALL.replace("Oslo", "Ås"), DRY]),
    ("no arguments", CALLING, calls(""), [JSON_CALL.replace('{"city": "Oslo"}', "{}"), DRY]),
    ("null arguments", CALLING, calls(None), [JSON_CALL.replace('{"city": "Oslo"}', "{}"), DRY]),
    (
        "flat calls",
        FLAT,
        [user("a"), assistant("", tool_calls=[{"name": "rain", "arguments": '{"city": 1}'}])],
        ['<tool_call>{"city": 1}rain<|im_end|>'],
    ),
    (
        "a template that joins strings",
        JOINS,
        calls('{"city":"Oslo"}'),
        ['<tool_call>rain {"city":"Oslo"}<|im_end|>', DRY],
    ),
    (
        "a template that prints",
        PRINTS,
        calls('{"city":"Oslo"}'),
        ['<tool_call>rain {"city":"Oslo"}<|im_end|>', DRY],
    ),
    (
        "a string within arguments",
        CALLING,
        calls('{"city": "{\\"a\\": 1}"}'),
        [JSON_CALL.replace("Oslo", '{\\"a\\": 1}'), DRY],
    ),
    # Keys of exporters that say nothing.
    ("null calls", COUNTS, [user("a"), assistant("b", tool_calls=None)], ["b<|im_end|>"]),
    ("empty calls", COUNTS, [user("a", tool_calls=[]), assistant("b")], ["b<|im_end|>"]),
    (
        "null reasoning",
        CHATML,
        [user("a", name=None), assistant("b", reasoning_content=None)],
        ["b<|im_end|>\n"],
    ),
    ("an empty list", CHATML, [user("a"), assistant("b", annotations=[])], ["b<|im_end|>\n"]),
    ("null ids", CALLING, calls('{"city":"Oslo"}', id=None), [JSON_CALL, DRY]),
    ("null content", ADDS, calls({"city": "Oslo"}, None), [JSON_CALL, DRY]),
    ("null content printed", SAYS_NONE, calls({"city": "Oslo"}, None), [JSON_CALL, DRY]),
    (
        "content that must be null",
        NEEDS_NULL,
        calls({"city": "Oslo"}),
        [JSON_CALL.replace("</tool_call>", ""), DRY],
    ),
    (
        "null weights",
        CHATML,
        [user("a", weight=None), assistant("b", weight=None, train=None)],
        ["b<|im_end|>"],
    ),
    # Reasoning and calls that the template renders; references that it need not.
    (
        "reasoning",
        REASONING,
        [user("a"), assistant("b", reasoning_content="r")],
        ["<think>r</think>b<|im_end|>"],
    ),
    (
        "thinking in the text",
        THINKING,
        [user("a"), assistant("<think>\nr\n</think>\n\nb")],
        ["<think>\nr\n</think>\n\nb<|im_end|>"],
    ),
    ("ids", CALLING, calls({"city": "Oslo"}, id="call_1"), [JSON_CALL, DRY]),
    (
        "lines",
        CHATML,
        [user("a\n\n b <b>c</b> [INST] "), assistant("x\ny\n")],
        ["x\ny\n<|im_end|>"],
    ),
    ("numbers of others", CHATML, [user("a", rating=4), assistant("b", index=1)], ["b<|im_end|>"]),
    # Turns that are not trained.
    (
        "weight 0",
        CHATML,
        [user("a"), assistant("b", weight=0), user("c"), assistant("d", weight=1)],
        ["d<|im_end|>"],
    ),
    (
        "train false",
        HEADERS,
        [user("a"), assistant("b"), user("c"), assistant("d", train=False)],
        ["b<|turn|>"],
    ),
    (
        "tags",
        TAGGED,
        [user("a"), assistant("b", train=False), user("c"), assistant("d")],
        ["d<|im_end|>"],
    ),
    ("a user's weight 0", BRACKETS, [user("a", weight=0.0), assistant("b")], [" b </s>"]),
    # How templates are written: macros, namespaces, blocks, tags within them, filters.
    (
        "a macro and a namespace",
        "{%- macro say(m) -%}{{ m.content }}{%- endmacro -%}{%- set n = namespace(i=0) -%}"
        + chatml("{%- set n.i = n.i + 1 %}{{- say(m) }}"),
        [user("a"), assistant("b")],
        ["b<|im_end|>"],
    ),
    (
        "tags in a macro",
        "{%- macro say(m) -%}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{%- endmacro -%}" + TAGGED.replace(INSIDE, "{{- say(message) }}"),
        [user("a"), assistant("b"), user("c"), assistant("d")],
        ["b<|im_end|>", "d<|im_end|>"],
    ),
    (
        "tags in a block",
        TAGGED.replace(INSIDE, "{% set x %}" + INSIDE + "{% endset %}{{- x }}"),
        [user("a"), assistant("b")],
        ["b<|im_end|>"],
    ),
    ("filters", chatml("{{- [m.content] | map('trim') | join }}"), *GREETING),
    ("a text in JSON", chatml("{{- (m.content | tojson)[1:-1] }}"), *GREETING),
    ("ASCII alone", chatml("{{- (m.content | tojson(ensure_ascii=true))[1:-1] }}"), *GREETING),
    # Odd texts.
    ("empty content", CHATML, [user(""), assistant("b")], ["b<|im_end|>"]),
    ("white space", CHATML, [user(" \n "), assistant("b")], ["b<|im_end|>"]),
    ("a mark inside", CHATML, [user("a\ufeffb"), assistant("c\ufeff")], ["c\ufeff<|im_end|>"]),
    ("ends of lines", CHATML, [user("a\r\nb"), assistant("c\r\nd")], ["c\r\nd<|im_end|>"]),
    ("NUL", CHATML, [user("a\0b"), assistant("c\0d")], ["c\0d<|im_end|>"]),
    ("a lone quote", CHATML, [user('"'), assistant("'\\\"")], ["'\\\"<|im_end|>"]),
    (
        "values of any kind",
        CALLING,
        calls({"city": None, "n": 10**40, "list": [[True], {"a": 1.5}], "é": ""}),
        [
            '<tool_call>{"name": "rain", "arguments": {"city": null, "n": 1'
            + "0" * 40
            + ', "list": [[true], {"a": 1.5}], "é": ""}}</tool_call><|im_end|>',
            DRY,
        ],
    ),
]


@pytest.mark.parametrize(
    ("template", "messages", "spans"), [row[1:] for row in RIGHT], ids=[row[0] for row in RIGHT]
)
def test_trained_as_it_is(load, template, messages, spans):
    example = load(template).example(messages)
    assert [span.rstrip("\n") for span in trained(example)] == [s.rstrip("\n") for s in spans]
    assert "None" not in example.text


# Refused by name --------------------------------------------------------------------------------

WHERE = r"message {}: {} is not rendered by .*tokenizer_config.json: take a template that renders"

WRONG = [
    (
        "reasoning",
        CHATML,
        [user("a"), assistant("b", reasoning_content="r")],
        WHERE.format(2, "reasoning_content"),
    ),
    ("thinking", REASONING, [user("a"), assistant("b", thinking="t")], WHERE.format(2, "thinking")),
    (
        "earlier reasoning",
        REASONING.replace("m.reasoning_content %}", "m.reasoning_content and loop.last %}"),
        [user("a"), assistant("b", reasoning_content="r"), user("c"), assistant("d")],
        "first 2 messages differently",
    ),
    (
        "developer",
        KNOWN_ROLES,
        [system("s", "developer"), user("a"), assistant("b")],
        WHERE.format(1, "content"),
    ),
    (
        "a later system message",
        FIRST_SYSTEM,
        [user("a"), system("s"), assistant("b")],
        WHERE.format(2, "content"),
    ),
    (
        "a tool's result",
        KNOWN_ROLES.replace(CONTENT, CONTENT + EACH_CALL + "c.function | tojson }}{% endfor %}"),
        calls({"city": "Oslo"}),
        WHERE.format(3, "content"),
    ),
    ("text beside a call", HEADERS, calls({"city": "Oslo"}, "I look."), WHERE.format(2, "content")),
    (
        "a part of a text",
        LAST_LINE,
        [user("a"), assistant("first\nsecond")],
        WHERE.format(2, "a part of content, 'first',"),
    ),
    (
        "a part of a user's text",
        LAST_LINE,
        [user("first\nsecond"), assistant("b")],
        WHERE.format(1, "a part of content, 'first',"),
    ),
    (
        "thinking in the text",
        NO_THINKING,
        [user("a"), assistant("<think>r</think>b")],
        WHERE.format(2, "a part of content, 'r',"),
    ),
    ("a name", CHATML, [user("a", name="Ada"), assistant("b")], WHERE.format(1, "name")),
    (
        "an image",
        CHATML,
        [user("a", images=["a.png"]), assistant("b")],
        WHERE.format(1, r"images\[0\]"),
    ),
    ("calls", CHATML, calls({"city": "Oslo"}), "message 2 calls tools, and .* does not render"),
    (
        "arguments",
        ONLY_NAMES,
        calls({"city": "Oslo"}),
        WHERE.format(2, r"tool_calls\[0\].function.arguments.city"),
    ),
    (
        "arguments that are no JSON",
        CALLING,
        calls("city=Oslo"),
        r"message 2: tool_calls\[0\].function.arguments is not JSON: .*'city=Oslo'",
    ),
    ("arguments that are a list", CALLING, calls("[1]"), "arguments must be a JSON object, got"),
    ("an argument twice", CALLING, calls('{"a": 1, "a": 2}'), "the key 'a' comes twice"),
    ("arguments of Python", PRINTS, calls({"city": "Oslo"}), "call as Python's dict, not as JSON"),
    ("quoted arguments", QUOTES, calls('{"city": "Oslo"}'), "refuses the conversation: TypeError"),
    (
        "half a weight",
        CHATML,
        [user("a"), assistant("b", weight=0.5)],
        "message 2: weight must be 0 or 1, got 0.5",
    ),
    ("a weight of true", CHATML, [user("a"), assistant("b", weight=True)], "must be 0 or 1, got"),
    ("train of 1", CHATML, [user("a"), assistant("b", train=1)], "train must be true or false"),
    ("both", CHATML, [user("a"), assistant("b", train=True, weight=0)], "say different things"),
    (
        "a user's weight",
        CHATML,
        [user("a", weight=1), assistant("b")],
        "message 1: weight would train a message of the role user",
    ),
    ("loss_mask", CHATML, [user("a"), assistant("b", loss_mask=0)], "the key 'loss_mask' is not s"),
    ("nothing trained", CHATML, [user("a"), assistant("b", weight=0)], "leave all turns .* unt"),
    ("a loop", LOOP + CHATML, [user("a"), assistant("b")], "takes more than 1,000 steps, and may"),
    ("a recursion", RECURSION + CHATML, [user("a"), assistant("b")], "takes more than 1,000 steps"),
    ("a text that doubles", DOUBLES + CHATML, [user("a"), assistant("b")], "a str of more than"),
    ("a block that doubles", BLOCKS + CHATML, [user("a"), assistant("b")], "a str of more than"),
    ("a power", "{{ 10 ** (10 ** 10) }}" + CHATML, [user("a"), assistant("b")], "is too large"),
    ("a product", "{{ 'ab' * 10 ** 9 }}" + CHATML, [user("a"), assistant("b")], "is too large"),
    *(
        (f"{made}, large", "{{ " + made + " }}" + CHATML, [user("a"), assistant("b")], message)
        for made, message in (
            ("'x'.ljust(10 ** 9)", "ljust makes more than 1,000 entries"),
            ("'x' | center(10 ** 9)", "center makes more than"),
            ("[1] | slice(10 ** 9) | list", "slice makes more than"),
            ("'%999999999d' % 1", "format makes more than"),
            ("'%*d' % (10 ** 9, 1)", "format makes more than"),
            ("'{:>{}}'.format(1, 10 ** 9)", "format makes more than"),
            ("'%.999999999f' | format(1.0)", "format makes more than"),
            ("('a' * 900) | replace('a', 'b' * 900)", "replace makes more than"),
            ("('a' * 900).join(['b'] * 900)", "join makes more than"),
            ("(['a' * 900] * 900) | join", "join makes more than"),
            ("messages | tojson(indent=10 ** 9)", "tojson indents by more than 80"),
            ("'a' * 900 + 'b' * 900", r"the result of \+ is too large"),
        )
    ),
    # Texts that lose their beginning, where no mark stands, or are changed.
    (
        "a text cut at a word",
        chatml("{{- m.content.split('Answer:')[-1] }}"),
        [user("a"), assistant("Since b. Answer: c")],
        "message 2: content: .* changes or cuts 'Since b. Answer: c': take a template",
    ),
    (
        "a text cut at its beginning",
        chatml("{{- m.content[2:] }}"),
        [user("first"), assistant("second")],
        "message 1: content: .* changes or cuts 'first'",
    ),
    (
        "upper case",
        chatml("{{- m.content | upper }}"),
        [user("first"), assistant("second")],
        "message 1: content: .* changes or cuts 'first'",
    ),
    # Calls that are no calls, and numbers that JSON does not have.
    (
        "a nameless call",
        CALLING,
        [user("a"), assistant("", tool_calls=[{"function": {"arguments": "{}"}}])],
        r"message 2: tool_calls\[0\].function.name must be that of a tool, got None",
    ),
    (
        "a function of null",
        CALLING,
        [user("a"), assistant("", tool_calls=[{"type": "function", "function": None}])],
        r"message 2: tool_calls\[0\].name must be that of a tool, got None",
    ),
    ("a huge number", CALLING, calls('{"x": 1e999}'), r"arguments.x: JSON has no number inf: wri"),
    ("no number", CALLING, calls('{"x": [NaN]}'), r"arguments.x\[0\]: JSON has no number nan"),
    ("deep arguments", CALLING, calls({"x": deep(2000)}), "its data has too many levels"),
    # Turns that the template's own tags leave untrained.
    (
        "a turn outside of tags",
        TAGGED.replace("message['role'] == 'assistant' %}", "loop.last %}"),
        [user("a"), assistant("b"), user("c"), assistant("d")],
        "message 2 is the assistant's, and no generation tag of .* holds it",
    ),
    (
        "a call outside of tags",
        TAGGED.replace(
            "{%- generation", "{{- (message.tool_calls or []) | tojson }}{%- generation"
        ),
        [user("a"), assistant("", tool_calls=[call({})]), *calls({})[2:]],
        "message 2 is the assistant's, and no generation tag of .* holds it",
    ),
]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [row[1:] for row in WRONG],
    ids=[row[0] for row in WRONG],
)
def test_refused_by_name(load, template, messages, message, monkeypatch):
    monkeypatch.setattr(sandbox, "STEPS", 1000)
    monkeypatch.setattr(sandbox, "LARGEST", 1000)
    with pytest.raises(ValueError, match=f"^a.jsonl, line 3: .*{message}") as error:
        load(template).example(messages, place="a.jsonl, line 3")
    assert "\n" not in str(error.value)


def test_a_template_that_never_ends_is_stopped(load):
    with pytest.raises(ValueError, match="takes more than 5,000,000 steps"):
        load(LOOP + CHATML).prompt([user("a")])


def test_nothing_is_drawn_at_random(load):
    for source in ("{{ lipsum() }}", "{{ [1, 2] | random }}"):
        with pytest.raises(ValueError, match="lipsum|random"):
            load(source).text([user("a")])


# Tools ------------------------------------------------------------------------------------------


def test_tools_that_are_left_out(load):
    messages = [user("a"), assistant("b")]
    assert '"city"' in load(TOOLS).example(messages, tools=[TOOL]).text
    assert load(CHATML).example(messages, tools=[]).text == load(CHATML).example(messages).text
    for source, field in (
        (CHATML, r"tools\[0\].function.name"),
        (ONLY_TOOL_NAMES, r"tools\[0\].function.description"),
        (
            ONLY_TOOL_NAMES.replace("t.function.name", "t.function.name + t.function.description"),
            r"tools\[0\].function.parameters.properties.city",
        ),
    ):
        for method in ("example", "turns"):
            with pytest.raises(ValueError, match=f"^x: {field} is not rendered by"):
                getattr(load(source), method)(messages, tools=[TOOL], place="x")
        with pytest.raises(ValueError, match=f"^x: {field} is not rendered by"):
            load(source).prompt(messages[:1], tools=[TOOL], place="x")
    with pytest.raises(ValueError, match=r"tools\[0\].type is not rendered"):
        load(TOOLS.replace("t | tojson", "t.name")).example(messages, tools=[{"type": "search"}])


def test_tool_use_is_taken_where_tools_are_given(load):
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOLS}]
    template, messages = load(named), [user("a"), assistant("b")]
    assert template.example(messages).text == load(CHATML).example(messages).text
    assert (
        template.example(messages, tools=[TOOL]).text
        == load(TOOLS).example(messages, tools=[TOOL]).text
    )
    assert template.fingerprint != load(CHATML).fingerprint != load(TOOLS).fingerprint
    assert load(named[:1]).fingerprint == load(CHATML).fingerprint


# Each turn by itself ----------------------------------------------------------------------------


def test_turns_may_lose_earlier_thinking_only(load):
    messages = [
        user("a"),
        assistant("<think>\nr\n</think>\n\nb"),
        user("c"),
        assistant("<think>\ns\n</think>\n\nd"),
    ]
    first, second = load(THINKING).turns(messages)
    assert trained(first) == ["<think>\nr\n</think>\n\nb<|im_end|>"]
    assert second.text.split("user\nc")[0].endswith("assistant\nb<|im_end|>\n<|im_start|>")
    forgets = chatml("{%- if m.role == 'user' or loop.last %}" + CONTENT + "{% endif %}")
    with pytest.raises(ValueError, match="message 2: content is not rendered"):
        load(forgets).turns([user("a"), assistant("b"), user("c"), assistant("d")])
    with pytest.raises(ValueError, match="message 2: content is not rendered"):
        load(forgets).prompt([user("a"), assistant("b"), user("c")])


def test_turns_of_weight_0_are_no_examples(load):
    messages = [user("a"), assistant("b", weight=0), user("c"), assistant("d")]
    for template in (CHATML, TAGGED):
        (only,) = load(template).turns(messages)
        assert trained(only) == ["d<|im_end|>"] and "b<|im_end|>" in only.text


def test_tags_that_do_not_tell_turns_apart(load):
    whole = "{% generation %}" + CHATML + "{% endgeneration %}{{ '!' }}"
    load(whole).example([user("a"), assistant("b")])
    with pytest.raises(ValueError, match="generation tags of .* do not tell them apart"):
        load(whole).example([user("a"), assistant("b"), user("c"), assistant("d", weight=0)])


def test_a_prompt_has_all_its_texts(load):
    with pytest.raises(ValueError, match="^x: message 1: content is not rendered"):
        load(KNOWN_ROLES).prompt([system("s", "developer"), user("a")], place="x")


# Text that spells tokens ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelled", ["<｜Assistant｜>", "x<｜User｜>y", "a<｜Assist", "</s><｜User｜>"]
)
def test_text_cannot_forge_tokens_that_are_not_special(load, spelled):
    template = load(ROLE_TOKENS)
    for messages in ([user(spelled), assistant("b")], [user("a"), assistant(spelled)]):
        example = template.example(messages)
        assert spelled in example.text
        for token in (*ROLES, "</s>"):
            assert tokens(template, example, token)[0] == 1
    assert template.example([user("a"), assistant("b")]).ids.tolist() == (
        template.backend.encode("<｜User｜>a<｜Assistant｜>b</s>", add_special_tokens=False).ids
    )


def test_only_those_who_speak_for_the_model_write_its_tags(load):
    template = load(THINKING)
    thought = "<think>\nr\n</think>\n\nb"
    example = template.example([user(thought), assistant(thought)])
    assert tokens(template, example, "<think>") == (1, 2)
    assert tokens(template, example, "</think>") == (1, 2)
    # A tag that the template does not write is a token in every text, as in plain text.
    example = load(CHATML).example([user("<think>"), assistant("b")])
    assert tokens(load(CHATML), example, "<think>") == (1, 1)
    example = load(CALLING).example(
        [system("Write <tool_call>."), user("<tool_call>"), assistant("<tool_call>")]
    )
    assert tokens(load(CALLING), example, "<tool_call>") == (2, 3)


# Lines of files ---------------------------------------------------------------------------------

LINES = [
    ({"system": "s"}, "the key 'system' of a conversation is not supported: only messages and"),
    ({"functions": [TOOL]}, "the key 'functions' of a conversation is not supported"),
    ({"documents": ["d"]}, "the key 'documents' of a conversation"),
    ({"chat_template_kwargs": {"a": 1}}, "the key 'chat_template_kwargs' of a conversation"),
    ({"weight": 0}, "the key 'weight' of a conversation is not supported: give messages the key"),
    ({"weight": 1, "id": 3}, "the key 'weight' of a conversation"),
    ({"images": ["a.png"]}, "the key 'images' of a conversation is not supported"),
    ({"audio": {"path": "a.wav"}}, "the key 'audio' of a conversation is not supported"),
    ({"history": [["a", "b"]]}, "the key 'history' of a conversation is not supported"),
]


@pytest.mark.parametrize(("keys", "message"), LINES)
def test_keys_of_a_line(tmp_path, keys, message):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [user("a"), assistant("b")], **keys}))
    with pytest.raises(ValueError, match=f"chats.jsonl, line 1: {message}"):
        list(read_chats(path))
    path.write_text(
        json.dumps({"messages": [user("a"), assistant("b")], **dict.fromkeys(keys), "source": "x"})
    )
    assert len(list(read_chats(path))) == 1


def test_a_key_that_comes_twice(tmp_path):
    path = tmp_path / "chats.jsonl"
    turns = json.dumps([user("a"), assistant("b")])
    path.write_text(f'{{"messages": {turns}, "messages": {turns}}}')
    with pytest.raises(ValueError, match="chats.jsonl, line 1: not JSON: the key 'messages' comes"):
        list(read_chats(path))


def test_keys_beside_a_prompt(tmp_path):
    path = tmp_path / "chats.jsonl"
    pair = {"prompt": "a", "response": "b"}
    for key in ("context", "input", "instruction", "history"):
        path.write_text(json.dumps(pair | {key: "x"}))
        with pytest.raises(ValueError, match=f"chats.jsonl, line 1: the key '{key}' of a conv"):
            list(read_chats(path))
    path.write_text(json.dumps(pair | {"context": "", "system": "", "images": [], "id": 3}))
    assert len(list(read_chats(path))) == 1


def test_a_deep_line(tmp_path):
    path = tmp_path / "chats.jsonl"
    turns = json.dumps([user("a"), assistant("b")])
    path.write_text(f'{{"messages": {turns}, "tree": {"[" * 100_000 + "]" * 100_000}}}')
    with pytest.raises(ValueError, match="chats.jsonl, line 1: not JSON: .*recursion"):
        list(read_chats(path))


ODD_MESSAGES = [
    [[user("a")]],
    [user(["a"])],
    [user([{"type": "image_url", "image_url": {"url": "x"}}])],
    [{"role": ["user"], "content": "a"}],
    [{"role": None, "content": "a"}],
    [user("a"), assistant("b", weight=10**400)],
    [user("a"), assistant("b", tool_calls="x")],
    [user("a"), assistant(None)],
    [user("a"), assistant("b", tool_calls=[None])],
    [user("\ud800"), assistant("b")],
    [user("a", **{"\udfff": "x"}), assistant("b")],
    [user("a\ufdd0"), assistant("b")],
]


@pytest.mark.parametrize("messages", ODD_MESSAGES, ids=range(len(ODD_MESSAGES)))
def test_odd_messages_are_refused_in_one_line(load, messages):
    with pytest.raises(ValueError, match="^a.jsonl, line 3: ") as error:
        load(CALLING).example([*messages, assistant("b")], place="a.jsonl, line 3")
    assert "\n" not in str(error.value)
