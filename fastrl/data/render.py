"""A prompt as the exact token ids the model sees: chat template or plain text, exactly one beginning-of-sequence id."""

from __future__ import annotations

from typing import Any

from fastrl.errors import DataError

Messages = list[dict[str, Any]]


class PromptRenderer:
    """Renders prompts with a tokenizer; every check that needs no data happens in the constructor.

    Args:
        tokenizer: a Hugging Face tokenizer.
        system_prompt: system message put before every prompt that has none.
        prompt_template: text with `{prompt}` in it that wraps every plain-text prompt.
        apply_chat_template: True or False, or None for "when the tokenizer has one".

    Raises:
        DataError: `prompt_template` without `{prompt}`, or a chat template asked of a tokenizer that has none.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_prompt: str | None = None,
        prompt_template: str | None = None,
        apply_chat_template: bool | None = None,
    ) -> None:
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if prompt_template is not None and "{prompt}" not in prompt_template:
            raise DataError(f"data.prompt_template = {prompt_template!r}: must contain {{prompt}}")
        if apply_chat_template and not has_template:
            raise DataError(
                "data.apply_chat_template = true, but the tokenizer has no chat template: give one as "
                "model.chat_template, or set data.apply_chat_template=false"
            )
        self.tokenizer = tokenizer
        self.system_prompt = system_prompt
        self.prompt_template = prompt_template
        self.chat = has_template if apply_chat_template is None else apply_chat_template
        self.has_template = has_template

    def render(self, prompt: str | Messages, tools: list[Any] | None = None) -> tuple[list[int], Messages | None]:
        """Token ids of the prompt, and the chat messages they were rendered from (None for plain text).

        Args:
            prompt: text, or chat messages; messages that end with the assistant's are continued.
            tools: tool descriptions handed to the chat template.
        """
        if not isinstance(prompt, str):
            if not self.chat:
                raise DataError(self._no_template())
            messages = check_messages(prompt)
        else:
            text = self.prompt_template.replace("{prompt}", prompt) if self.prompt_template else prompt
            if not self.chat:
                return self.encode_text(f"{self.system_prompt}\n\n{text}" if self.system_prompt else text), None
            messages = [{"role": "user", "content": text}]
        if self.system_prompt and messages[0].get("role") != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        return self.encode_messages(messages, tools), messages

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text with what the tokenizer puts *before* a sequence, and nothing after it."""
        plain = list(self.tokenizer.encode(text, add_special_tokens=False))
        full = list(self.tokenizer.encode(text, add_special_tokens=True))
        num_added = len(full) - len(plain)
        # some tokenizers close a sequence with eos: a prompt must stay open
        for before in range(num_added, -1, -1):
            if full[before : before + len(plain)] == plain:
                return self._one_bos(full[:before] + plain)
        return self._one_bos(full)

    def encode_messages(self, messages: Messages, tools: list[Any] | None = None) -> list[int]:
        """Ids of chat messages under the chat template, ready for the assistant to speak."""
        continues = messages[-1].get("role") == "assistant"
        ids = self.tokenizer.apply_chat_template(
            messages,
            tools=tools or None,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )
        return self._one_bos(list(ids))

    def _one_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        while bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            ids = ids[1:]
        return ids

    def _no_template(self) -> str:
        if self.has_template:
            return "chat messages cannot be rendered with data.apply_chat_template = false; set it to null or true"
        return (
            "the prompts are chat messages, but the tokenizer has no chat template: give one as model.chat_template, "
            "or use plain-text prompts (data.prompt_column)"
        )


def check_messages(messages: Any) -> Messages:
    """The messages as a list of dicts; raises DataError when they are not chat messages."""
    valid = (
        isinstance(messages, list | tuple) and messages and all(isinstance(m, dict) and "role" in m for m in messages)
    )
    if not valid:
        raise DataError(f"a prompt is text or a list of messages with role and content, not {str(messages)[:80]!r}")
    # parquet fills keys that other messages have with None; templates test for presence
    return [{key: value for key, value in m.items() if value is not None} for m in messages]


def plain_text(prompt: str | Messages) -> str:
    """The question itself: the text, or the content of the last user message."""
    if isinstance(prompt, str):
        return prompt
    last = next((m for m in reversed(prompt) if m.get("role") == "user"), prompt[-1])
    content = last.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content if isinstance(part, dict))
