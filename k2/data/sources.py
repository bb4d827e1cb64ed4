"""Where documents come from: Python's own documentation, or files of text at a local path or URL.

A text file (txt, md) is one document; a long one is cut at blank lines, so that a book still has parts to hold out. A jsonl line or
parquet row is a document: `text`, and optionally `domain` (else "text"), `license` and `source`. Any file may be compressed.
"""

import difflib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from k2 import storage
from k2.errors import ConfigError, K2Error

PYTHON_DOCS = "python-docs"
FORMATS = (".txt", ".md", ".jsonl", ".parquet")
PART_CHARACTERS = 32768  # a longer text file is cut at the first blank line beyond this
DEFAULT_DOMAIN, UNKNOWN_LICENSE = "text", "unknown"


@dataclass(frozen=True, slots=True)
class Document:
    text: str
    domain: str
    license: str
    source: str
    group: str | None = None  # documents of a group are held out together; None: the document stands alone


def read(source: str) -> Iterator[Document]:
    """The documents of corpus.source, in an order that depends on names alone. K2Error names the file that cannot be used."""
    if source == PYTHON_DOCS:
        from k2.data import python_docs

        yield from python_docs.read()
        return
    if not storage.is_remote(source) and "/" not in source and not os.path.exists(source):
        hint = f"did you mean `{PYTHON_DOCS}`?" if difflib.get_close_matches(source, [PYTHON_DOCS]) else "check the spelling"
        raise ConfigError(f"params.yaml: corpus.source: `{source}` is neither `{PYTHON_DOCS}` nor an existing path; {hint}")
    files = storage.list_files(source)
    usable = [file for file in files if _format(file) in FORMATS]
    if not usable:
        found = f"its {len(files)} files end otherwise" if files else "it is empty"
        raise K2Error(f"{source}: no file ends in {', '.join(FORMATS)} (compressed or not); {found}")
    if len(usable) < len(files):
        print(f"{source}: skipped {len(files) - len(usable)} files that end in none of {', '.join(FORMATS)}")
    for file in usable:
        yield from read_file(file)


def read_file(path: str) -> Iterator[Document]:
    """The documents of one file, by its ending."""
    with storage.open_file(path) as file:
        if _format(path) == ".jsonl":
            yield from _jsonl(path, file)
        elif _format(path) == ".parquet":
            yield from _parquet(path, file)
        else:
            for number, part in enumerate(cut(_decode(file.read(), path))):
                yield Document(part, DEFAULT_DOMAIN, UNKNOWN_LICENSE, f"{path}#{number}" if number else path)


def cut(text: str) -> Iterator[str]:
    """A text in parts that end at the first blank line beyond PART_CHARACTERS; together they are the text."""
    begin = 0
    while True:
        end = text.find("\n\n", begin + PART_CHARACTERS)
        if end < 0:
            yield text[begin:]
            return
        yield text[begin : end + 2]
        begin = end + 2


def _jsonl(path: str, file: IO[bytes]) -> Iterator[Document]:
    for number, line in enumerate(io.BufferedReader(file), 1):  # type: ignore[arg-type]
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(_decode(line, where))
        except ValueError as error:
            raise K2Error(f"{where}: not JSON ({error}); a jsonl file holds one object a line") from None
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise K2Error(f"{where}: has no string `text`; each line must be an object with the document under `text`")
        yield _from_record(record, path)


def _parquet(path: str, file: IO[bytes]) -> Iterator[Document]:
    import pyarrow.parquet
    import pyarrow.types

    table = pyarrow.parquet.ParquetFile(file)
    names = table.schema_arrow.names
    is_text = "text" in names and str(table.schema_arrow.field("text").type) in ("string", "large_string", "string_view")
    if not is_text:
        raise K2Error(
            f"{path}: has no column `text` of strings (columns: {', '.join(names)}); rename the documents' column to `text`"
        )
    columns = [name for name in ("text", "domain", "license", "source") if name in names]
    for batch in table.iter_batches(batch_size=256, columns=columns):
        for record in batch.to_pylist():
            yield _from_record(record, path)


def _from_record(record: dict[str, Any], path: str) -> Document:
    return Document(
        record["text"] or "",
        str(record.get("domain") or DEFAULT_DOMAIN),
        str(record.get("license") or UNKNOWN_LICENSE),
        str(record.get("source") or path),
    )


def _decode(data: bytes, where: str) -> str:
    """Bytes as UTF-8 text; K2Error when they are not."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise K2Error(
            f"{where}: not text (byte {error.start} is no valid UTF-8); convert it to UTF-8 or take it out of the corpus"
        ) from None
    if "\0" in text:
        raise K2Error(f"{where}: not text (it holds zero bytes); take the binary file out of the corpus")
    return text


def _format(path: str) -> str:
    """The ending that tells the format: that of x.jsonl.gz is .jsonl."""
    ending = storage.suffix(path)
    return storage.suffix(path.split("?")[0][: -len(ending)]) if ending in storage.COMPRESSIONS else ending
