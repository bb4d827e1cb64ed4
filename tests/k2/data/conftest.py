import pydoc_data.topics

import pytest

from k2.tokenizer import ChatTokenizer, bpe


@pytest.fixture(scope="session")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(bpe.train(pydoc_data.topics.topics.values(), 1024))
