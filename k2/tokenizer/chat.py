"""K2's dialogue format on token level: dialogues to tokens with a loss mask, and generated tokens back to messages.

    <|im_system|>tool_declare<|im_middle|>[{"type":"function",...}]<|im_end|>
    <|im_user|>user<|im_middle|>What is 2+2?<|im_end|>
    <|im_assistant|>assistant<|im_middle|>Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0
        <|tool_call_argument_begin|>{"a": 2, "b": 2}<|tool_call_end|><|tool_calls_section_end|><|im_end|>
    <|im_system|>tool<|im_middle|>## Return of functions.add:0\n4<|im_end|>

(report appendix B; token names of the released tokenizer). The same as chat_template.jinja gives in transformers, with one
difference on purpose: a special token's name inside a message stays plain text here, so that nobody can forge a turn.
K2's released template puts a default system prompt in front ("You are Kimi, ..."); ours adds nothing that is not in the dialogue.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from k2.errors import K2Error
from k2.tokenizer import bpe

HEADS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}  # every other role: <|im_system|>
CALL_ID = re.compile(r"functions\.([\w.-]+):\d+")
Message = dict[str, Any]


class Segment(NamedTuple):
    text: str
    special: bool = False  # one special token
    trained: bool = False  # said by the assistant: carries loss


class ChatTokenizer:
    """A folder with tokenizer.json, opened with the `tokenizers` library alone (transformers takes seconds to import)."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tokenizer.encode_special_tokens = True  # names of special tokens in a text are text
        ids = {token: tokenizer.token_to_id(token) for token in bpe.SPECIAL_TOKENS}
        missing = [token for token, index in ids.items() if index is None]
        if missing:
            raise K2Error(f"the tokenizer lacks {', '.join(missing)}; make it with the tokenizer stage")
        self._ids: dict[str, int] = ids
        self._names = {index: token for token, index in ids.items()}
        self.vocab_size = bpe.vocabulary_size(tokenizer)
        self.bos_id, self.eos_id, self.pad_id = ids["[BOS]"], ids["[EOS]"], ids["[PAD]"]
        self.im_end_id = ids["<|im_end|>"]
        self.stop_ids = [self.im_end_id, self.eos_id]  # what ends a generation

    @classmethod
    def load(cls, folder: Path | str) -> "ChatTokenizer":
        """Open the tokenizer of a folder (a tokenizer's or a model's). K2Error names the file that is missing or broken."""
        return cls(bpe.load(Path(folder) / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        """Tokens of a text; nothing is added, and special tokens are never parsed from it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, on all cores."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones by their names. Broken UTF-8 at the ends becomes U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes of each token, (vocab_size,) int32, special tokens 0: the denominator of bits per byte."""
        return bpe.token_bytes(self._tokenizer)

    def render(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """The dialogue as one string, equal to chat_template.jinja's."""
        return "".join(segment.text for segment in segments(messages, tools, add_generation_prompt))

    def encode_chat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None = None, add_generation_prompt: bool = False
    ) -> tuple[list[int], list[bool]]:
        """Tokens of a dialogue and, for each, whether it carries loss: exactly what the assistant says, <|im_end|> included."""
        ids: list[int] = []
        mask: list[bool] = []
        for text, special, trained in segments(messages, tools, add_generation_prompt):
            piece = [self._ids[text]] if special else self.encode(text)
            ids += piece
            mask += [trained] * len(piece)
        return ids, mask

    def parse_assistant(self, ids: Sequence[int]) -> Message:
        """The assistant message in generated tokens (what follows the generation prompt), up to <|im_end|> or [EOS].

        A tool-call section that breaks the format, or whose arguments are no JSON object, stays in `content`.
        """
        ends = [i for i, token in enumerate(ids) if token in (self.im_end_id, self.eos_id)]
        ids = list(ids[: ends[0]] if ends else ids)
        message: Message = {"role": "assistant"}
        begin = self._ids["<|tool_calls_section_begin|>"]
        calls = self._parse_calls(ids[ids.index(begin) :]) if begin in ids else None
        message["content"] = self.decode(ids[: ids.index(begin)] if calls else ids)
        if calls:
            message["tool_calls"] = calls
        return message

    def _parse_calls(self, ids: list[int]) -> list[dict[str, Any]] | None:
        """The calls of a section that begins with ids[0], None if it is malformed or does not end the message."""
        shape = ["<|tool_call_begin|>", None, "<|tool_call_argument_begin|>", None, "<|tool_call_end|>"]
        pieces: list[str | list[int]] = []  # special tokens by name, runs of plain ones as lists
        for token in ids:
            if token in self._names:
                pieces.append(self._names[token])
            elif pieces and isinstance(pieces[-1], list):
                pieces[-1].append(token)
            else:
                pieces.append([token])
        body = pieces[1:-1]
        if pieces[-1] != "<|tool_calls_section_end|>" or not body or len(body) % len(shape):
            return None
        calls = []
        for i in range(0, len(body), len(shape)):
            call = body[i : i + len(shape)]
            if [piece if isinstance(piece, str) else None for piece in call] != shape:
                return None
            name, arguments = self.decode(call[1]), self.decode(call[3])  # type: ignore[arg-type]
            match = CALL_ID.fullmatch(name)
            if not match or not _is_object(arguments):
                return None
            calls.append({"id": name, "type": "function", "function": {"name": match[1], "arguments": arguments}})
        return calls


def segments(messages: list[Message], tools: list[dict[str, Any]] | None, add_generation_prompt: bool) -> Iterator[Segment]:
    """The dialogue cut at its special tokens; text between two of them is one segment, as the tokenizer sees it."""
    if tools:
        yield from _head("system", "tool_declare")
        yield Segment(json.dumps(tools, ensure_ascii=False, separators=(",", ":")))
        yield Segment("<|im_end|>", special=True)
    for message in messages:
        role = message["role"]
        trained = role == "assistant"
        yield from _head(role, message.get("name") or role)
        text = _text(message.get("content"))
        yield Segment(f"## Return of {message['tool_call_id']}\n{text}" if role == "tool" else text, trained=trained)
        if trained and message.get("tool_calls"):
            yield Segment("<|tool_calls_section_begin|>", True, True)
            for call in message["tool_calls"]:
                arguments = call["function"]["arguments"]
                yield Segment("<|tool_call_begin|>", True, True)
                yield Segment(call["id"], False, True)
                yield Segment("<|tool_call_argument_begin|>", True, True)
                yield Segment(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False), False, True)
                yield Segment("<|tool_call_end|>", True, True)
            yield Segment("<|tool_calls_section_end|>", True, True)
        yield Segment("<|im_end|>", True, trained)
    if add_generation_prompt:
        yield from _head("assistant", "assistant")


def _head(role: str, name: str) -> Iterator[Segment]:
    yield Segment(HEADS.get(role, "<|im_system|>"), special=True)
    yield Segment(name)
    yield Segment("<|im_middle|>", special=True)


def _text(content: Any) -> str:
    """A message's content: a string, null, or OpenAI's list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part["text"] for part in content)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
