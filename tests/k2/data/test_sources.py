import bz2
import gzip
import json
import lzma
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from k2.data import sources
from k2.errors import ConfigError, K2Error

LINES = [{"text": "First, é.", "domain": "wiki", "license": "CC0-1.0"}, {"text": "Second.\nTwo lines."}]


def texts(source: Path | str) -> list[str]:
    return [document.text for document in sources.read(str(source))]


def jsonl() -> bytes:
    return "".join(json.dumps(line) + "\n\n" for line in LINES).encode()


@pytest.mark.parametrize(
    "ending, compress",
    [
        ("", bytes),
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".zst", lambda data: b"".join(zstandard.compress(data[i : i + 40]) for i in range(0, len(data), 40))),
    ],
)
def test_compressed_files_read_like_plain_ones(tmp_path: Path, ending: str, compress):
    """txt and jsonl give the same documents plain and through each codec; zstd in several frames too."""
    (tmp_path / f"a.jsonl{ending}").write_bytes(compress(jsonl()))
    (tmp_path / f"b.txt{ending}").write_bytes(compress(b"\xef\xbb\xbfPlain text.\r\n"))
    documents = list(sources.read(str(tmp_path)))
    assert [d.text for d in documents] == ["First, é.", "Second.\nTwo lines.", "Plain text.\r\n"]
    assert [d.domain for d in documents] == ["wiki", "text", "text"] and documents[0].license == "CC0-1.0"


def test_parquet_rows_are_documents(tmp_path: Path):
    """Columns text and domain are taken, others ignored; a null text is an empty document."""
    table = pyarrow.table({"text": ["one", None, "three"], "domain": ["code", "code", None], "label": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert [(d.text, d.domain) for d in sources.read(str(tmp_path / "x.parquet"))] == [
        ("one", "code"),
        ("", "code"),
        ("three", "text"),
    ]


def test_a_folder_is_read_in_order_and_below(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Files come by name, subfolders included, hidden and foreign files left out with a note."""
    for name in ("b.md", "a/z.txt", ".hidden.txt", ".git/x.txt", "picture.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a/z.txt", "b.md"]
    assert "skipped 1 files" in capsys.readouterr().out


def test_urls_are_read_through_fsspec():
    """Any fsspec URL works: here a file system in memory."""
    import fsspec

    with fsspec.open("memory://corpus/part/x.jsonl.gz", "wb", compression="gzip") as file:
        file.write(jsonl())  # type: ignore[attr-defined]
    assert texts("memory://corpus") == [line["text"] for line in LINES]


def test_a_long_text_is_cut_at_blank_lines_and_nothing_is_lost():
    """The parts of a book join to the book, each ends at a blank line beyond the length."""
    book = "\n\n".join(f"Paragraph {i}. " + "word " * (i % 50) for i in range(2000))
    parts = list(sources.cut(book))
    assert "".join(parts) == book and len(parts) > 5
    assert all(len(part) >= sources.PART_CHARACTERS and part.endswith("\n\n") for part in parts[:-1])


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("x.txt", b"caf\xe9", r"x\.txt: not text \(byte 3 is no valid UTF-8\)"),
        ("x.md", b"GIF89a\x00\x01", r"x\.md: not text \(it holds zero bytes\)"),
        ("x.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', r"x\.jsonl:2: has no string `text`"),
        ("x.jsonl", b'{"text": "a"}\n{"text": 3}\n', r"x\.jsonl:2: has no string `text`"),
        ("x.jsonl", b'{"text": "a"}\n\n{"text": \n', r"x\.jsonl:3: not JSON"),
        ("x.jsonl", b'{"text": "\xff"}\n', r"x\.jsonl:1: not text"),
        ("x.txt.gz", b"not gzip", r"x\.txt\.gz: not readable .*damaged"),
        ("x.txt.gz", gzip.compress(b"text" * 999)[:-9], r"x\.txt\.gz: not readable .*damaged"),
        ("x.txt.xz", b"\xfd7zXZ\x00 broken", r"x\.txt\.xz: not readable"),
        ("x.txt.zst", b"broken", r"x\.txt\.zst: not readable"),
        ("x.parquet", b"broken", r"x\.parquet: not readable"),
        ("x.png", b"", r"no file ends in .txt, .md, .jsonl, .parquet"),
        ("x", None, r"no file ends in .*it is empty"),
    ],
)
def test_bad_files_are_named_in_one_line(tmp_path: Path, name: str, content: bytes | None, message: str):
    """What cannot be a document is an error with the file (and line), never a traceback or a silent gap."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(K2Error, match=message) as error:
        texts(tmp_path)
    assert "\n" not in str(error.value)


def test_a_parquet_without_text_names_its_columns(tmp_path: Path):
    pyarrow.parquet.write_table(pyarrow.table({"content": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(K2Error, match=r"x\.parquet: has no column `text` of strings \(columns: content\)"):
        texts(tmp_path)


@pytest.mark.parametrize(
    "source, kind, message",
    [
        ("python-doc", ConfigError, "corpus.source: `python-doc` is neither .* did you mean `python-docs`"),
        ("no/such/folder", K2Error, "no/such/folder: not found"),
        ("memory://nowhere", K2Error, "memory://nowhere: not found"),
        ("gopher://x/y.txt", K2Error, "gopher://x/y.txt: this kind of address cannot be opened"),
    ],
)
def test_a_source_that_is_not_there_is_named(source: str, kind: type, message: str):
    with pytest.raises(kind, match=message):
        texts(source)


def test_python_docs_hold_both_domains_in_a_fixed_order():
    """Two readings agree; docs and code are there; a module's documentation and source share their group, so their split."""
    documents = list(sources.read("python-docs"))
    assert documents[:90] == [d for d, _ in zip(sources.read("python-docs"), range(90))]
    assert {d.domain for d in documents} == {"docs", "code"} and {d.license for d in documents} == {"PSF-2.0"}
    groups = {d.group for d in documents if d.source.startswith("python/docstrings/json")}
    assert groups == {d.group for d in documents if d.source.startswith("python/source/json")} and "json.decoder" in groups
    code = "".join(d.text for d in documents if d.source.startswith("python/source/textwrap#"))
    import inspect
    import textwrap

    assert code == inspect.getsource(textwrap)
