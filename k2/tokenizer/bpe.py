"""Byte-level BPE with K2's special tokens at the end of the vocabulary, trained or taken from a folder.

Differences from K2's own tokenizer (a tiktoken of 163,840 tokens with 256 places for special ones): digits are split singly, where
K2 joins up to three, because a small model then learns arithmetic; and only the special tokens that the recipe uses are there.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from k2.errors import ConfigError, K2Error

# In K2's order, as in its released tokenizer_config.json: [BOS] first, [PAD] last.
SPECIAL_TOKENS = [
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|im_middle|>", "[UNK]", "[PAD]",
]  # fmt: skip

# K2's pre-tokenizer (after tiktoken's o200k): Han runs; words with an optional leading mark; digits; punctuation; blanks.
_LETTER_UPPER, _LETTER_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTER_UPPER}*{_LETTER_LOWER}+{_ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTER_UPPER}+{_LETTER_LOWER}*{_ENDING}",
        r"\p{N}",  # K2: \p{N}{1,3}
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A BPE of exactly `vocab_size` tokens, special ones included. Places that the texts cannot fill become reserved tokens."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise ConfigError(f"params.yaml: model.vocab_size: {vocab_size} is below {smallest}, the 256 bytes and the special tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS), initial_alphabet=sorted(alphabet), min_frequency=2, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = vocab_size - len(SPECIAL_TOKENS) - tokenizer.get_vocab_size()
    if missing:
        print(f"the corpus gave {tokenizer.get_vocab_size()} tokens; {missing} of {vocab_size} stay reserved")
        _add_special(tokenizer, [f"<|reserved_token_{i}|>" for i in range(missing)])
    _add_special(tokenizer, SPECIAL_TOKENS)
    return tokenizer


def sample(texts: list[str], characters: int) -> list[str]:
    """At most about `characters` of the texts, evenly spaced over them, so that every part of a corpus counts."""
    step = max(1.0, sum(map(len, texts)) / characters)
    return [texts[int(i * step)] for i in range(int(len(texts) / step))]


def adopt(path: Path, vocab_size: int) -> Tokenizer:
    """An existing byte-level tokenizer (a folder or its tokenizer.json); K2's special tokens that it lacks come at the end."""
    file = path / "tokenizer.json" if path.is_dir() else path
    tokenizer = load(file, "params.yaml: tokenizer.path: ")
    token_bytes(tokenizer)  # refuses what is not byte-level
    missing = [token for token in SPECIAL_TOKENS if tokenizer.token_to_id(token) is None]
    if missing:
        print(f"{file}: added {len(missing)} special tokens of the chat template")
    _add_special(tokenizer, SPECIAL_TOKENS)  # those that are there keep their ids and become special
    size = vocabulary_size(tokenizer)
    if size > vocab_size:
        raise ConfigError(f"params.yaml: model.vocab_size: {vocab_size} is below the {size} tokens of {file}")
    return tokenizer


def load(file: Path, key: str = "") -> Tokenizer:
    """Open a tokenizer.json; K2Error names it (after `key`, who asked for it) when it is missing or not one."""
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise K2Error(f"{key}{file}: not found; it must be the tokenizer.json of a Hugging Face tokenizer") from None
    except Exception as error:  # tokenizers raises plain Exception
        raise K2Error(f"{key}{file}: not a Hugging Face tokenizer.json: {' '.join(str(error).split())}") from None


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, as transformers.AutoTokenizer reads them.

    [EOS] ends a document; a dialogue's turn ends with <|im_end|>, which generation stops at (K2's generation_config.json).
    """
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "extra_special_tokens": SPECIAL_TOKENS[2:-2],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    shutil.copyfile(TEMPLATE, folder / TEMPLATE.name)


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id: what a model's embedding must hold, also if an adopted vocabulary has holes."""
    return max(tokenizer.get_vocab().values()) + 1


def token_bytes(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes that each token stands for, (vocabulary,) int32; special tokens 0. In byte-level BPE a character is a byte."""
    special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    sizes = np.zeros(vocabulary_size(tokenizer), dtype=np.int32)
    for token, index in tokenizer.get_vocab(with_added_tokens=False).items():
        if index in special:
            continue
        if not alphabet.issuperset(token):
            raise K2Error(f"the tokenizer is not byte-level (token {token!r}); take a byte-level BPE, such as GPT-2's")
        sizes[index] = len(token)
    for index, token in tokenizer.get_added_tokens_decoder().items():
        if not token.special:
            sizes[index] = len(token.content.encode())
    return sizes


def _add_special(tokenizer: Tokenizer, tokens: list[str]) -> None:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
