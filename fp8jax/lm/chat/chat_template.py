"""Chat data: conversations become text, ids, and a mask of what the assistant wrote.

`load_chat_template` reads the template of a Hugging Face folder. `ChatTemplate.example` renders a
whole conversation to train on, `turns` renders each of the assistant's turns with what came before
it, and `prompt` renders what a model continues.

The mask says which tokens the assistant writes, so that a loss can be restricted to them. Templates
with the tag `generation` mark these themselves. For others, such as those of Llama 3.1 and Qwen 3,
a turn is what the template adds to its own generation prompt:

    prompt   render(messages[:i], add_generation_prompt=True)   …<|im_start|>assistant⏎
    whole    render(messages[:i + 1])                           …<|im_start|>assistant⏎Hi<|im_end|>⏎
    turn     the difference                                     Hi<|im_end|>

A turn includes the special token that ends it, since the model has to write it, too. The white
space after that token does not count: whoever stops at the token never sees it. This works if each
of these texts begins the text of the whole conversation. Templates that render earlier turns
differently once later ones follow (Qwen 3's leaves out earlier thinking) are refused by `example`,
and rendered by `turns`: each turn after what the model will see before it.

Text that spells a special token stays text in a message, as everywhere in this package: only the
template can write special tokens, and other tokens of its own (forgery.py). A token that a turn
contains in part counts as a whole.

A text that the template does not render is an error, whatever message or tool it is of (leaves.py).
Messages with the weight 0 are rendered, and the mask leaves them out (message_forms.py).
"""

import dataclasses
import datetime
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from jaxtyping import Bool, Int32

from fp8jax.lm.chat.conversation import (
    Message,
    check_example,
    check_messages,
    too_many_levels,
)
from fp8jax.lm.chat.forgery import Tokens, plain_message, plain_tools, tokens_of
from fp8jax.lm.chat.message_forms import forms, is_trained
from fp8jax.lm.chat.rendering import Conversation
from fp8jax.lm.chat.sandbox import GUARD
from fp8jax.lm.chat.template import Template, read_config, read_source, read_tools_source
from fp8jax.lm.data.bad_examples import BadChatError, Reason
from fp8jax.lm.data.bpe import BPETokenizer
from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lookup import brief

T = TypeVar("T")

Spans = Sequence[tuple[int, int]]
_NONE: Spans = ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ChatExample:
    """A rendered conversation.

    Attributes:
      text: the rendered text.
      ids: the tokens of the text.
      mask: which of them the assistant wrote; neither none nor all of them.
      spans: the begin and end of each of the assistant's turns, as offsets in `text`.

    Example:
      >>> from fp8jax.lm.chat.chat_template import ChatExample
      >>> ids, mask = np.array([1, 2, 3], np.int32), np.array([False, False, True])
      >>> ChatExample(text="Hi! Hello", ids=ids, mask=mask, spans=((4, 9),)).mask.sum().item()
      1
    """

    text: str
    ids: Int32[np.ndarray, " length"]
    mask: Bool[np.ndarray, " length"]
    spans: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ChatTemplate:
    """Renders conversations; `load_chat_template` creates it.

    Further arguments of the methods are variables of the template, such as `enable_thinking`.
    `place` says where messages are from, such as "chats.jsonl, line 3", and begins every error.

    Attributes:
      template: renders conversations without tools.
      tools_template: is taken where tools are given; it is `template` unless a folder has two.
      tokens: those that the template writes, which messages cannot spell.
      tokenizer: encodes the rendered text.
      fingerprint: hex digest of the templates and of what they read besides messages.
      backend: the tokenizer of the package tokenizers, which recognizes special tokens.

    Example:
      >>> from fp8jax.lm.chat.chat_template import load_chat_template
      >>> from fp8jax.lm.chat.chat_tokenizer import write_chat_tokenizer
      >>> from fp8jax.lm.data.tokenizers import tokenizer
      >>> folder = Path(tempfile.mkdtemp())
      >>> write_chat_tokenizer(folder / "tokenizer.json", iter(["Hi! Hello."]), 259)
      >>> template = load_chat_template(folder, tokenizer(f"bpe:{folder}/tokenizer.json"))
      >>> hello = {"role": "assistant", "content": "Hello."}
      >>> example = template.example([{"role": "user", "content": "Hi!"}, hello])
      >>> template.tokenizer.decode(example.ids[example.mask])  # what the model learns to write
      'Hello.'
    """

    template: Template
    tools_template: Template
    tokens: Tokens
    tokenizer: BPETokenizer
    fingerprint: str
    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)  # recognizes special tokens

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        place: str = "messages",
        **variables: Any,
    ) -> Int32[np.ndarray, " length"]:
        """Returns the ids that a model continues with the assistant's next turn.

        Raises:
          ValueError: the messages are no conversation (`check_messages`), their last one is the
            assistant's, or the template refuses them, leaves a text out, or renders nothing.
        """
        check_messages(messages, place)
        if messages[-1]["role"] == "assistant":
            raise ValueError(f"{place}: the last message is the assistant's, so it has no turn")
        text = self._first_form(messages, tools, variables, place, self._prompt)
        ids = self._encode(text, place)[0]
        if not len(ids):
            raise ValueError(f"{place}: {self.template.place} makes an empty text of the messages")
        return ids

    def _prompt(self, conversation: Conversation) -> str:
        text = conversation.render(prompt=True).text
        conversation.require_rendered(text, turn=len(conversation.messages), prompt=True)
        return text

    def turn_ends(self) -> tuple[int, ...]:
        """Returns the id of the added token with which the assistant's turn ends, if any.

        It is often not the tokenizer's EOS: ChatML has its own. Not every tokenizer calls it
        special. A template whose turns cannot be found has none.
        """
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            example = self.example(messages)
        except ValueError:
            return ()
        added = self.tokenizer.backend.get_added_tokens_decoder()
        for last in reversed(example.ids[example.mask].tolist()):
            text = added[last].content if last in added else self.tokenizer.decode([last])
            if text.strip():  # white space may follow a turn's end, and be a token of its own
                return (last,) if last in added else ()
        return ()

    def text(self, messages: Sequence[Message]) -> str:
        """Returns the whole conversation as text.

        Raises:
          ValueError: the messages are no conversation (`check_messages`), or the template refuses
            them.
        """
        check_messages(messages, "messages")
        first = forms(messages, "messages")[0]
        return self._conversation(first, None, {}, "messages").render().text.replace(GUARD, "")

    def example(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        place: str = "messages",
        **variables: Any,
    ) -> ChatExample:
        """Returns the whole conversation, and which of its tokens the assistant wrote.

        Raises:
          BadChatError: the messages are no example (`check_example`), the template refuses them,
            leaves a text out or renders some turns differently once others follow, or the mask
            would hold none or all of the tokens.
        """
        check_example(messages, place)
        return self._first_form(messages, tools, variables, place, self._whole)

    def _whole(self, conversation: Conversation) -> ChatExample:
        """Returns the example of a whole conversation."""
        rendered, spans = conversation.render(), _NONE
        if conversation.template.has_tags:
            spans = conversation.trained_spans(rendered)
        else:
            spans = self._spans(conversation, rendered.text)
        made = self._example(rendered.text, spans, conversation.place)
        conversation.require_rendered(rendered.text)
        conversation.require_in_tags(np.flatnonzero(conversation.trained).tolist())
        return made

    def _spans(self, conversation: Conversation, text: str) -> Spans:
        """Returns the spans of the turns that are trained, in the text of the conversation."""
        spans: list[tuple[int, int]] = []
        place = conversation.place
        for i in range(len(conversation.messages)):
            if conversation.is_assistant(i):
                begin, upto = self._turn(conversation.upto(i + 1))
                if not text.startswith(upto):
                    raise BadChatError(
                        Reason.TURNS,
                        f"{place}: the template renders the first {i + 1} messages differently "
                        f"once others follow, {_difference(upto, text)}: render each turn by "
                        "itself, with `turns`",
                    )
                if conversation.trained[i]:
                    spans.append((begin, self._end(upto, begin)))
        return spans

    def turns(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        place: str = "messages",
        **variables: Any,
    ) -> list[ChatExample]:
        """Returns an example for each of the assistant's turns: what came before it, and the turn.

        Its mask holds the last turn only, also for templates with generation tags.

        Raises:
          BadChatError: as `example`, but turns may be rendered differently once others follow.
        """
        check_example(messages, place)
        return self._first_form(messages, tools, variables, place, self._each_turn)

    def _each_turn(self, conversation: Conversation) -> list[ChatExample]:
        """Returns the examples of the turns that are trained."""
        examples = []
        for i in range(len(conversation.messages)):
            if not (conversation.is_assistant(i) and conversation.trained[i]):
                continue
            part, spans = conversation.upto(i + 1), _NONE
            if part.template.has_tags:
                before = len(part.upto(i).render().spans) if i else 0
                rendered = part.render()
                text, spans = rendered.text, rendered.spans[before:]
            else:
                begin, text = self._turn(part)
                spans = ((begin, self._end(text, begin)),)
            examples.append(self._example(text, spans, f"{part.place}, message {i + 1}"))
            part.require_rendered(text, turn=i)
            part.require_in_tags([i])
        return examples

    def _first_form(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        place: str,
        make: Callable[[Conversation], T],
    ) -> T:
        """Returns what is made of the first form of the messages that the template can render.

        Raises:
          BadChatError: there is none; the error of the first.
        """
        errors = []
        try:
            for form in forms(messages, place):
                try:
                    return make(self._conversation(form, tools, variables, place, messages))
                except BadChatError as error:
                    errors.append(error)
        except RecursionError as error:
            raise too_many_levels(place) from error
        raise errors[0]

    def _conversation(
        self,
        form: Sequence[Message],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        place: str,
        messages: Sequence[Message] = (),
    ) -> Conversation:
        """Returns a form of some messages with guards."""
        return Conversation(
            messages=[
                plain_message(message, self.tokens, f"{place}: message {i + 1}")
                for i, message in enumerate(form)
            ],
            tools=plain_tools(tools, self.tokens, place) if tools else None,
            template=self.tools_template if tools else self.template,
            variables=variables,
            trained=[is_trained(message) for message in messages],
            place=place,
        )

    def _turn(self, conversation: Conversation) -> tuple[int, str]:
        """Returns where the last message begins in the text of all, and this text."""
        number, place = len(conversation.messages), conversation.place
        before = conversation.upto(number - 1).render(prompt=True).text
        text = conversation.render().text
        if not text.startswith(before):
            raise BadChatError(
                Reason.TURNS,
                f"{place}: message {number} does not begin as the template's generation "
                f"prompt does, {_difference(before, text)}: the assistant's turn cannot be found",
            )
        return len(before), text

    def _end(self, text: str, begin: int) -> int:
        """Returns where the turn ends that begins at `begin`: after its last special token."""
        ends = [found.end() for found in self._special.finditer(text, begin)]
        return ends[-1] if ends and not text[ends[-1] :].strip() else len(text)

    def _example(self, guarded: str, spans: Spans, place: str) -> ChatExample:
        """Returns the example of a text with guards, and spans in it."""
        spans = tuple(
            (begin - guarded.count(GUARD, 0, begin), end - guarded.count(GUARD, 0, end))
            for begin, end in spans
        )
        text = guarded.replace(GUARD, "")
        ids, offsets = self._encode(guarded, place)
        begins, ends = offsets.T
        mask = np.zeros(len(ids), bool)
        for begin, end in spans:
            mask |= (begins < end) & (ends > begin)
        if not mask.any() or mask.all():
            what = "all" if mask.any() else "none"
            raise BadChatError(
                Reason.SUPERVISION,
                f"{place}: {what} of the {len(ids)} tokens are the assistant's, in {_brief(text)}",
            )
        return ChatExample(text=text, ids=ids, mask=mask, spans=spans)

    def _encode(self, guarded: str, place: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a text with guards, and offsets [length, 2] in the text without them.

        Raises:
          BadChatError: a message spells a token, and the tokenizer encodes text differently after
            one, so that the parts of the text cannot be encoded apart; or the template writes a
            token that the model has no row for.
        """
        ids, offsets = self._encode_guarded(guarded, place)
        if (high := ids[ids >= self.tokenizer.vocab_size]).size:
            token = self.backend.id_to_token(int(high[0]))
            raise BadChatError(
                Reason.NOT_TEXT,
                f"{place}: {self.template.place} writes {token!r}, id {high[0]}, and the model has"
                f" {self.tokenizer.vocab_size} rows",
            )
        return ids, offsets

    def _encode_guarded(self, guarded: str, place: str) -> tuple[np.ndarray, np.ndarray]:
        text = guarded.replace(GUARD, "")
        if len(self._tokens.findall(text)) == len(self._tokens.findall(guarded)):
            return self._encode_whole(text)  # no message spells a token
        spelled = [token.replace(GUARD, "") for token in self._forged.findall(guarded)]
        without = self._forged.sub("", guarded).replace(GUARD, "")
        if not np.array_equal(self._encode_parts(without)[0], self._encode_whole(without)[0]):
            raise BadChatError(
                Reason.NOT_TEXT,
                f"{place}: a message spells a token of the template, which with this tokenizer "
                f"cannot be kept text: remove {', '.join(sorted(set(spelled)))}",
            )
        return self._encode_parts(guarded)

    def _encode_whole(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        encoding = self.backend.encode(text, add_special_tokens=False)
        return _ids(encoding.ids), _offsets(encoding.offsets)

    def _encode_parts(self, guarded: str) -> tuple[np.ndarray, np.ndarray]:
        """Encodes the template's tokens and the texts between them one by one."""
        ids, offsets, at = [_ids([])], [_offsets([])], 0
        for i, part in enumerate(re.split(f"({self._tokens.pattern})", guarded)):
            part = part.replace(GUARD, "")
            if i % 2:
                index = self.backend.token_to_id(part)
                assert index is not None
                ids.append(_ids([index]))
                offsets.append(_offsets([(at, at + len(part))]))
            else:
                encoding = self.plain.encode(part, add_special_tokens=False)
                ids.append(_ids(encoding.ids))
                offsets.append(_offsets(encoding.offsets) + at)
            at += len(part)
        return np.concatenate(ids), np.concatenate(offsets)

    @functools.cached_property
    def plain(self) -> tokenizers.Tokenizer:
        """Encodes text that spells the template's tokens as text, with complete offsets."""
        spec = json.loads(self.backend.to_str())
        for token in spec["added_tokens"]:
            token["special"] |= token["content"] in self.tokens.all
        copy = tokenizers.Tokenizer.from_str(json.dumps(spec))
        copy.encode_special_tokens = True
        return copy

    @functools.cached_property
    def _special(self) -> re.Pattern[str]:
        """Finds special tokens, the longest where several begin."""
        return _any_of(self.tokens.special)

    @functools.cached_property
    def _tokens(self) -> re.Pattern[str]:
        """Finds special tokens, and others that the template writes."""
        return _any_of(self.tokens.all)

    @functools.cached_property
    def _forged(self) -> re.Pattern[str]:
        """Finds tokens that a message spells."""
        return _any_of([token[0] + GUARD + token[1:] for token in self.tokens.all])


def load_chat_template(
    folder: str | os.PathLike[str],
    tokenizer: Tokenizer | None,
    *,
    name: str | None = None,
    now: datetime.datetime | None = None,
) -> ChatTemplate:
    """Returns the chat template of a Hugging Face folder.

    Args:
      folder: has a chat_template.jinja, or a tokenizer_config.json with a chat_template.
      tokenizer: the folder's tokenizer.
      name: which of several templates; None for the only one, or the one named default, and the
        one named tool_use where tools are given.
      now: the time that templates write into their texts (Llama 3's write today's date); None for
        the time of this call. It does not change after that, so the same messages give the same
        tokens; give one to repeat them on another day.

    Returns:
      What renders conversations as text, ids and masks.

    Raises:
      ValueError: the tokenizer is not a BPE, which has the special tokens of templates; or the
        folder has no template, none of that name, or a damaged one.

    Example:
      >>> from fp8jax.lm.chat.chat_template import load_chat_template
      >>> from fp8jax.lm.chat.chat_tokenizer import write_chat_tokenizer
      >>> from fp8jax.lm.data.tokenizers import tokenizer
      >>> folder = Path(tempfile.mkdtemp())
      >>> write_chat_tokenizer(folder / "tokenizer.json", iter(["Hi! Hello."]), 259)
      >>> template = load_chat_template(folder, tokenizer(f"bpe:{folder}/tokenizer.json"))
      >>> template.text([{"role": "user", "content": "Hi!"}])
      '<|im_start|>user\\nHi!<|im_end|>\\n'
    """
    folder = Path(folder).expanduser()
    if not isinstance(tokenizer, BPETokenizer):
        has = "there is none" if tokenizer is None else f"this one is {tokenizer.name}"
        raise ValueError(f"{folder}: chat templates need the tokenizer of a tokenizer.json; {has}")
    variables, now = _named_tokens(folder), datetime.datetime.now() if now is None else now
    sources = [read_source(folder, name), read_tools_source(folder, name)]
    template, tools_template = (
        Template.compile(source, place=place, variables=variables, now=now)
        for source, place in sources
    )
    added = tokenizer.backend.get_added_tokens_decoder().values()
    tokens = tokens_of(
        {token.content: token.special for token in added},
        [text for each in (template, tools_template) for text in (each.source, *_probed(each))],
        template.place,
    )
    # Folders with one template have the fingerprints that they had before there could be two.
    texts = list(dict.fromkeys(source for source, _ in sources))
    reads = json.dumps([*texts, variables, now.isoformat()], sort_keys=True)
    return ChatTemplate(
        template=template,
        tools_template=tools_template,
        tokens=tokens,
        tokenizer=tokenizer,
        backend=_backend(tokenizer),
        fingerprint=hashlib.sha256(reads.encode()).hexdigest(),
    )


_PROBE_STEPS = 10_000
_CALL = {"name": "call", "arguments": {"a": "b"}}
_PROBES: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": _CALL, **_CALL}]},
        {"role": "tool", "content": "b"},
    ],
)


def _probed(template: Template) -> list[str]:
    """Returns the texts of some conversations, of those that a template renders."""
    texts = []
    for messages in _PROBES:
        for tools in (None, [{"type": "function", "function": _CALL}]):
            try:
                rendered = template.render(
                    messages,
                    tools=tools,
                    add_generation_prompt=True,
                    variables={},
                    place=template.place,
                    steps=_PROBE_STEPS,
                )
                texts.append(rendered.text)
            except BadChatError:
                continue
    return texts


def _backend(tokenizer: BPETokenizer) -> tokenizers.Tokenizer:
    """Returns a copy of the tokenizer's backend that turns special tokens in a text into ids."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.encode_special_tokens = False
    # It would add tokens, which are not asked for, and cut white space off the offsets.
    backend.post_processor = None
    return backend


def _named_tokens(folder: Path) -> dict[str, str]:
    """Returns bos_token and so on, by the names under which templates read them."""
    named = {}
    for key, token in read_config(folder).items():
        if not key.endswith("_token"):
            continue
        if isinstance(token, dict) and "content" in token:
            token = token["content"]
        if isinstance(token, str):
            named[key] = token
    return named


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    """Returns a pattern without groups that finds any of the texts, the longest first."""
    ordered = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _ids(ids: Sequence[int]) -> Int32[np.ndarray, " length"]:
    return np.array(ids, np.int32)


def _offsets(offsets: Sequence[tuple[int, int]]) -> Int32[np.ndarray, "length 2"]:
    return np.array(offsets, np.int32).reshape(-1, 2)


def _difference(expected: str, text: str) -> str:
    """Says where a text stops beginning with what was expected."""
    at = len(os.path.commonprefix([expected, text]))
    begin = max(0, at - 20)
    return f"…{_brief(expected[begin : at + 40])} against …{_brief(text[begin : at + 40])}"


def _brief(text: str) -> str:
    return brief(text.replace(GUARD, ""))
