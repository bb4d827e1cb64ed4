import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from k2.errors import ConfigError, K2Error
from k2.tokenizer import ChatTokenizer, bpe


def test_special_tokens_end_a_vocabulary_of_the_exact_size(folder: Path, tokenizer: ChatTokenizer):
    """Ids are 0 to vocab_size - 1 without holes, and the last ones are K2's special tokens in K2's order."""
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert sorted(raw.get_vocab().values()) == list(range(1024))
    assert [raw.id_to_token(1024 - len(bpe.SPECIAL_TOKENS) + i) for i in range(len(bpe.SPECIAL_TOKENS))] == bpe.SPECIAL_TOKENS
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.bos_id) == (1024, 1023, 1010)


def test_a_small_corpus_is_filled_with_reserved_tokens(capsys: pytest.CaptureFixture):
    """model.vocab_size is met exactly even when the corpus has too few pairs to merge, and the user hears of it."""
    tokenizer = bpe.train(["ab ab ab"], 400)
    assert tokenizer.get_vocab_size() == 400 and tokenizer.token_to_id("[PAD]") == 399
    assert "stay reserved" in capsys.readouterr().out


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ConfigError, match=r"model.vocab_size: 200 is below 270"):
        bpe.train(["text"], 200)


def test_any_text_survives_encoding(tokenizer: ChatTokenizer):
    """decode(encode(x)) == x for random Unicode, control characters, blanks and the names of special tokens."""
    rng = random.Random(0)
    alphabet = [chr(c) for c in range(1, 0x250)] + list("中文字😀\u200d\n\n\t  ") + bpe.SPECIAL_TOKENS
    for _ in range(300):
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 60)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_names_in_text_are_text(tokenizer: ChatTokenizer):
    """No token of `encode` is a special one, whatever the text says."""
    ids = tokenizer.encode("".join(bpe.SPECIAL_TOKENS))
    assert max(ids) < tokenizer.vocab_size - len(bpe.SPECIAL_TOKENS)


def test_digits_stand_alone(tokenizer: ChatTokenizer):
    """Each digit is one token of its own, so that numbers align by place."""
    ids = tokenizer.encode("123456789")
    assert [tokenizer.decode([i]) for i in ids] == list("123456789")


def test_token_bytes_sum_to_the_text(tokenizer: ChatTokenizer):
    """The byte counts of a text's tokens add up to its UTF-8 length; special tokens count 0."""
    sizes = tokenizer.token_bytes()
    for text in ("plain words", "naïve 中文 😀", "def f(x):\n    return x\n", "[EOS]"):
        assert sizes[tokenizer.encode(text)].sum() == len(text.encode())
    assert sizes[-len(bpe.SPECIAL_TOKENS) :].sum() == 0 and len(sizes) == tokenizer.vocab_size


def test_an_adopted_tokenizer_keeps_its_ids_and_gains_the_special_tokens(folder: Path, tmp_path: Path):
    """A plain BPE becomes usable for dialogues: old ids unchanged, K2's tokens behind them."""
    plain = json.loads((folder / "tokenizer.json").read_text())
    plain["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(plain))
    adopted = bpe.adopt(tmp_path, vocab_size=1024)
    assert adopted.encode("the statement").ids == Tokenizer.from_file(str(folder / "tokenizer.json")).encode("the statement").ids
    assert adopted.token_to_id("[BOS]") == 1010 and adopted.get_vocab_size() == 1024
    with pytest.raises(ConfigError, match="model.vocab_size: 1000 is below the 1024 tokens"):
        bpe.adopt(tmp_path, vocab_size=1000)


@pytest.mark.parametrize("content", [None, "", "{}", "\x00binary"])
def test_a_bad_tokenizer_file_is_named(tmp_path: Path, content: str | None):
    """A missing or broken tokenizer.json is one line that names the key and the file."""
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(K2Error, match=r"tokenizer.path: .*tokenizer\.json: not ") as error:
        bpe.adopt(tmp_path, 1024)
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path):
    """Bits per byte need to know a token's bytes: a vocabulary of words is turned down."""
    Tokenizer(models.WordLevel({"▁the": 0, "[UNK]": 1}, "[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(K2Error, match="not byte-level"):
        bpe.adopt(tmp_path, 1024)
