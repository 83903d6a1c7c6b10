"""A conversation and its template: what is rendered of it, and what is left out."""

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8jax.lm.chat.leaves import Leaf, Marked, mark
from fp8jax.lm.chat.message_forms import arguments_of
from fp8jax.lm.chat.sandbox import GUARD
from fp8jax.lm.chat.template import Rendered, Template
from fp8jax.lm.data.bad_examples import BadChatError, Reason
from fp8jax.lookup import brief


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Conversation:
    """One form of a conversation (message_forms.py), with guards, and the template that renders it.

    Attributes:
      variables: of the template.
      trained: whether the loss counts each message, if it is the assistant's.
      place: where it is from; begins errors.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    template: Template
    variables: Mapping[str, Any]
    trained: list[bool]
    place: str

    def upto(self, number: int) -> "Conversation":
        """Returns the first messages."""
        return dataclasses.replace(self, messages=self.messages[:number])

    def is_assistant(self, index: int) -> bool:
        return self.messages[index]["role"] == "assistant"

    def render(self, *, prompt: bool = False) -> Rendered:
        """Renders it, and with `prompt` the beginning of the assistant's next turn."""
        return self._render(self.messages, self.tools, prompt)

    def _render(self, messages: Sequence[Any], tools: Any, prompt: bool) -> Rendered:
        return self.template.render(
            messages,
            tools=tools,
            add_generation_prompt=prompt,
            variables=self.variables,
            place=self.place,
        )

    @functools.cached_property
    def _marked(self) -> Marked:
        return mark(self.messages, self.tools)

    @functools.cached_property
    def _marks(self) -> Rendered:
        """The conversation, rendered with marks in its texts."""
        return self._render(self._marked.messages, self._marked.tools, prompt=False)

    def trained_spans(self, rendered: Rendered) -> tuple[tuple[int, int], ...]:
        """Returns the spans of `generation` tags whose messages are trained.

        Raises:
          BadChatError: some messages are trained, others not, and a span cannot be told from whose
            it is.
        """
        if all(self.trained):
            return rendered.spans
        owners = [self._marked.messages_of(self._marks.text[b:e]) for b, e in self._marks.spans]
        if len(owners) != len(rendered.spans) or any(len(each) != 1 for each in owners):
            raise BadChatError(
                Reason.TURNS,
                f"{self.place}: some turns are not trained, and the generation tags of "
                f"{self.template.place} do not tell them apart",
            )
        numbers = [number for (number,) in owners]
        return tuple(
            span
            for span, number in zip(rendered.spans, numbers, strict=True)
            if number is not None and self.trained[number]
        )

    def require_in_tags(self, numbers: Iterable[int]) -> None:
        """Raises BadChatError if no `generation` tag holds one of the assistant's messages.

        Nothing is asked of templates without such tags.
        """
        if not self.template.has_tags:
            return
        spans = self._marks.spans
        held = set().union(*(self._marked.messages_of(self._marks.text[b:e]) for b, e in spans))
        for i in numbers:
            has_text = any(leaf.message == i for leaf in self._marked.leaves)
            if self.is_assistant(i) and has_text and i not in held:
                raise BadChatError(
                    Reason.TURNS,
                    f"{self.place}: {self._message(i)} is the assistant's, and no generation tag "
                    f"of {self.template.place} holds it, so that it would not be trained",
                )

    def require_rendered(self, text: str, *, turn: int = 0, prompt: bool = False) -> None:
        """Raises BadChatError if a text of the conversation is left out, changed, or not as JSON.

        Args:
          text: what `render` made of it.
          turn: the number of the message that is trained. Of the assistant's before it, what comes
            before their last line may be missing, since templates leave out earlier thinking.
        """
        self._require_json(text)
        marked = self._marked
        other = self._render(marked.messages, marked.tools, prompt) if prompt else self._marks
        missing = [leaf for leaf in marked.missing(other.text) if self._is_needed(leaf, turn)]
        if missing:
            first = missing[0]
            rest = [leaf for leaf in marked.leaves if leaf not in missing]
            part = any((leaf.message, leaf.field) == (first.message, first.field) for leaf in rest)
            raise self._left_out(first, part)
        plain = text.replace(GUARD, "")
        for leaf in marked.leaves:
            if self._is_needed(leaf, turn) and not leaf.stands_in(plain):
                raise self._changed(leaf)
        self._require_no_none(text, prompt)

    def _is_needed(self, leaf: Leaf, turn: int) -> bool:
        if leaf.message is None or leaf.message >= turn or not self.is_assistant(leaf.message):
            return True
        return leaf.last if leaf.field == "content" else leaf.field.startswith("tool_calls")

    def _changed(self, leaf: Leaf) -> BadChatError:
        """Returns the error for a text of which a part is left out, or which is changed."""
        where = f"{self._message(leaf.message)}: " if leaf.message is not None else "tools"
        return BadChatError(
            Reason.TEMPLATE,
            f"{self.place}: {where}{leaf.field}: {self.template.place} changes or cuts "
            f"{brief(leaf.text.replace(GUARD, ''))}: take a template that writes it as it is",
        )

    def _left_out(self, leaf: Leaf, part: bool) -> BadChatError:
        """Returns the error for a text that is not rendered, or is rendered in `part`."""
        template, where = self.template.place, self._message(leaf.message)
        if leaf.message is None:
            said = f"tools{leaf.field} is not rendered by {template}"
        elif leaf.field.endswith(".name") and leaf.field.startswith("tool_calls"):
            said = f"{where} calls tools, and {template} does not render the calls"
            return BadChatError(Reason.TEMPLATE, f"{self.place}: {said}: take a template that does")
        else:
            what = f"a part of {leaf.field}, {brief(leaf.text)}," if part else leaf.field
            said = f"{where}: {what} is not rendered by {template}"
        return BadChatError(
            Reason.TEMPLATE,
            f"{self.place}: {said}: take a template that renders it, or remove it",
        )

    def _message(self, index: int | None) -> str:
        return "" if index is None else f"message {index + 1}"

    def _require_json(self, text: str) -> None:
        """Raises BadChatError if arguments of a call are written as Python's dict, or quoted."""
        for i, message in enumerate(self.messages):
            for arguments in arguments_of(message):
                quoted = isinstance(arguments, str) and json.dumps(arguments, ensure_ascii=False)
                if isinstance(arguments, Mapping) and arguments and repr(arguments) in text:
                    said = "as Python's dict"
                elif quoted and quoted in text:
                    said = "as a quoted text"
                else:
                    continue
                raise BadChatError(
                    Reason.TEMPLATE,
                    f"{self.place}: message {i + 1}: {self.template.place} writes the arguments of "
                    f"a call {said}, not as JSON",
                )

    def _require_no_none(self, text: str, prompt: bool) -> None:
        """Raises BadChatError if the template writes None where a message has no content."""
        nulls = [i for i, message in enumerate(self.messages) if _has_null(message)]
        if not nulls or "None" not in text:
            return
        blank = [{**m, "content": ""} if _has_null(m) else m for m in self.messages]
        try:
            other = self._render(blank, self.tools, prompt).text
        except BadChatError:  # it needs the null
            return
        if text.count("None") > other.count("None"):
            raise BadChatError(
                Reason.TEMPLATE,
                f"{self.place}: {self._message(nulls[0])} has no content, and {self.template.place}"
                " writes None",
            )


def _has_null(message: Mapping[str, Any]) -> bool:
    return "content" in message and message["content"] is None
