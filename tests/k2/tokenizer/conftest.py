import pydoc_data.topics
from pathlib import Path

import pytest

from k2.tokenizer import ChatTokenizer, bpe

VOCAB = 1024


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder, trained on Python's help texts."""
    path = tmp_path_factory.mktemp("tokenizer")
    bpe.save(bpe.train(pydoc_data.topics.topics.values(), VOCAB), path)
    return path


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> ChatTokenizer:
    return ChatTokenizer.load(folder)
