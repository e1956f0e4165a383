"""Text from every kind of file, in a fixed order, unchanged; what is not text is refused by name."""

from __future__ import annotations

import gzip
import json
import lzma
import random
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from prism.language import text

ROWS = ["first\ndocument", "zweites Dokument: ü", "third\r\n"]


def read(path: Path, field: str = "text") -> list[str]:
    return ["".join(document) for document in text.documents(path, field)]


def test_a_text_file_is_one_document_in_pieces_that_end_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 7)  # cuts inside characters of several bytes
    content = "Zeile ä\r\n日本語の行\n\nwithout an end 🙂"
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode())
    (document,) = text.documents(path)
    pieces = list(document)
    assert "".join(pieces) == content and len(pieces) > 2
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert "".join(document) == content, "a document can be read twice"


def test_rows_of_jsonl_and_parquet_are_documents(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"body": row, "id": i}) for i, row in enumerate(ROWS)) + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(lines)
    pyarrow.parquet.write_table(pyarrow.table({"body": ROWS, "id": [1, 2, 3]}), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert read(tmp_path / name, "body") == ROWS, name


def test_compressed_text_reads_as_text(tmp_path: Path) -> None:
    for opener, name in ((gzip.open, "a.txt.gz"), (lzma.open, "a.txt.xz")):
        with opener(tmp_path / name, "wb") as file:
            file.write(ROWS[1].encode())
        assert read(tmp_path / name) == [ROWS[1]]


def test_folders_are_searched_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/y.jsonl.gz", "c.bin", "a.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    found = [path.relative_to(tmp_path).as_posix() for path in text.find_files([str(tmp_path)])]
    assert found == ["a/y.jsonl.gz", "a/z.md", "b.txt"]
    assert [path.name for path in text.find_files([str(tmp_path)], "*.py")] == ["a.py"]
    assert text.find_files([str(tmp_path / "c.bin")]) == [tmp_path / "c.bin"], "a file that is named is taken as it is"


def test_the_standard_library_is_there_and_is_text() -> None:
    files = text.standard_library()
    assert len(files) > 100
    assert {"argparse.py", "json"} <= {name for path in files for name in (path.name, path.parent.name)}
    assert not any(
        {"test", "site-packages"} & set(path.parts[path.parts.index("lib") :]) for path in files if "lib" in path.parts
    )
    assert "import" in "".join(read(files[0]))


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*nowhere"):
        text.find_files([str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match="holds no file that ends in"):
        text.find_files([str(tmp_path)])
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"na" + "ïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text: byte 0xef at offset 2 "):
        read(latin)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2 is not JSON"):
        read(rows)
    rows.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1 is not JSON"):
        read(rows)
    rows.write_text('{"body": "fine"}\n')
    with pytest.raises(ValueError, match=r"line 1 has no text under 'text' \(it has body\)"):
        read(rows)
    table = tmp_path / "t.parquet"
    table.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"t\.parquet is not a parquet file"):
        read(table)
    pyarrow.parquet.write_table(pyarrow.table({"body": ROWS}), table)
    with pytest.raises(ValueError, match="has no column 'text'; it has body"):
        read(table)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.xz"])
@pytest.mark.parametrize("damage", ["cut", "changed", "not compressed"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / name
    whole = b'{"text": "%s"}\n' % bytes(random.Random(0).choices(b"abcdefgh", k=5000))
    data = gzip.compress(whole) if name.endswith("gz") else lzma.compress(whole)
    middle = len(data) // 2
    path.write_bytes(
        {"cut": data[:middle], "changed": data[:20] + b"\xff" * 40 + data[60:], "not compressed": whole}[damage]
    )
    with pytest.raises(ValueError, match=rf"{re.escape(name)} does not decompress: "):
        read(path)


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"{i} " * 50 for i in range(300)]}), path, use_dictionary=False)
    data = path.read_bytes()
    path.write_bytes(data[:200] + bytes(400) + data[600:])
    with pytest.raises(ValueError, match=r"t\.parquet is damaged after row 0: "):
        read(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"text": null}', "line 1 has nothing under 'text', not text"),
        ('{"text": 3}', "line 1 has int under 'text', not text"),
        (r'{"text": "a \ud800"}', "line 1 cannot be encoded as UTF-8: surrogates not allowed at 2"),
    ],
)
def test_rows_that_are_no_text_are_named(tmp_path: Path, row: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(ValueError, match=message):
        read(path)


def test_the_offset_of_a_bad_byte_is_right_in_later_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE_BYTES", 4)
    path = tmp_path / "a.txt"
    path.write_bytes(b"abcdefg\xc3(hi")  # a lead byte at the end of one piece, no continuation in the next
    with pytest.raises(ValueError, match="byte 0xc3 at offset 7 "):
        read(path)


def test_a_hub_dataset_is_asked_for_by_name_and_a_failure_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(*arguments: object, **options: object) -> list[dict[str, str]]:
        asked.append((*arguments, options))
        if arguments[0] == "no/where":
            raise ConnectionError("the hub cannot be reached\nand more")
        return [{"text": row} for row in ROWS]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert ["".join(document) for document in text.hub_documents("hub:owner/data:clean")] == ROWS
    assert asked == [("owner/data", "clean", {"split": "train"})]
    with pytest.raises(ValueError, match=r"^the dataset no/where could not be opened: the hub cannot be reached$"):
        text.hub_documents("hub:no/where")


def test_a_folder_of_other_files_is_refused_with_the_pattern_that_reads_them(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.toml"):
        (tmp_path / name).write_text("x = 1\n")
    refused = r"holds no file that ends in .*; to read others, "
    with pytest.raises(ValueError, match=refused + r"give a pattern: --data\.pattern '\*\.py'$"):
        text.find_files([str(tmp_path)], pattern_flag="--data.pattern")
    with pytest.raises(ValueError, match=refused + r"give the files themselves: .*\*\.py$"):
        text.find_files([str(tmp_path)])  # `prism evaluate lm` has no flag for a pattern
    assert [path.name for path in text.find_files([str(tmp_path)], "*.py")] == ["a.py", "b.py"]
