"""Files from strangers: bounded, never run, refused in one line."""

import os
import pickle
import zipfile

import pytest
import torch

from treeopt.app.convert import IMPORT_FORMATS, import_file
from treeopt.errors import DocumentError
from treeopt.formats.reading import pick, read_literals


class Bomb:
    """Unpickled carelessly it leaves a file behind."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def refused(path, source, **options):
    with pytest.raises(DocumentError) as caught:
        import_file(path, source, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))
    assert os.fspath(path) in message
    return message


@pytest.mark.parametrize("saved_by", ["pickle", "torch"])
@pytest.mark.parametrize("source", ["sequoia", "sequoia-vector", "ppd-accuracies"])
def test_code_in_a_pickle_is_refused_and_not_run(tmp_path, source, saved_by):
    file, trace = tmp_path / "evil.pt", tmp_path / "trace"
    if saved_by == "pickle":
        file.write_bytes(pickle.dumps(Bomb(trace)))
    else:
        torch.save({"roots": Bomb(trace)}, file)
    assert "holds code" in refused(file, source, num_distances=2)
    assert not trace.exists()


@pytest.mark.parametrize("source", IMPORT_FORMATS)
def test_a_gigabyte_is_refused_unread(tmp_path, source):
    file = tmp_path / "large"
    with file.open("wb") as stream:
        stream.truncate(2**30)
    assert "is larger than" in refused(file, source, num_distances=2)


@pytest.mark.parametrize("source", ["medusa", "eagle", "vllm", "ppd", "umbrella", "jetspec"])
def test_ten_thousand_nested_lists_are_refused(tmp_path, source):
    file = tmp_path / "deep"
    file.write_text("[" * 10_000 + "]" * 10_000)
    assert "nested" in refused(file, source)
    file.write_text('{"a": ' + "[" * 10_000 + "]" * 10_000 + "}")
    assert "nested" in refused(file, source)


def test_nested_lists_in_a_pickle_are_refused(tmp_path):
    file = tmp_path / "deep.pt"
    file.write_bytes(b"\x80\x02" + b"]" * 10_000 + b"a" * 9_999 + b".")
    for source in ("sequoia", "sequoia-vector", "ppd-accuracies"):
        refused(file, source, num_distances=2)


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path):
    file = tmp_path / "bomb.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * (65 * 2**20))
    assert "unpacks to more" in refused(file, "sequoia")


@pytest.mark.parametrize("source", IMPORT_FORMATS)
def test_every_format_names_a_file_that_is_missing_empty_or_a_folder(tmp_path, source):
    assert "cannot be read" in refused(tmp_path / "none", source, num_distances=2)
    refused(tmp_path, source, num_distances=2)
    (tmp_path / "empty").write_text(" \n")
    assert "is empty" in refused(tmp_path / "empty", source, num_distances=2)
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    refused(tmp_path / "noise", source, num_distances=2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("x = [[0], __import__('os').mkdir('trace')]", "only lists and dictionaries of numbers"),
        ("x = [" + "-" * 200_000 + "1]", "only lists and dictionaries of numbers"),
        ("x = [1" + "+1" * 100_000 + "]", "without a comma"),
        ("x = [1 2]", "without a comma"),
        ("x = [[0], [1]", "lacks 1 closing brackets"),
        ("x = [0)]", "closes nothing"),
        ("x = {1: [], 1: []}", "repeats a key"),
        ("x = {[1]: 2}", "check its brackets"),
        ("x = [1,,2]", "check its brackets"),
        ("x = [" + "9" * 5_000 + "]", "check its brackets"),
        ("import os\nx = [[0]]", "begins with text"),
        ("x = [[0]]\nx = [[1]]", "stands twice"),
        ("print(1)", "only lists and dictionaries of numbers"),
    ],
)
def test_literals_that_are_not_plain_are_refused(tmp_path, monkeypatch, text, problem):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "literals.py"
    file.write_text(text)
    assert problem in refused(file, "medusa")
    assert [item.name for item in tmp_path.iterdir()] == ["literals.py"]


def test_named_literals_span_lines_and_skip_comments(tmp_path):
    file = tmp_path / "choices.py"
    file.write_text("# trees\na = [[0],\n  [1]]\n# the next\nb_2 = ((0,),)\n")
    assert read_literals(file) == {"a": [[0], [1]], "b_2": ((0,),)}
    file.write_text('{"source": "somewhere", "a": [[0]]}')
    assert read_literals(file) == {"a": [[0]]}
    file.write_text("[[0], [0, 0]]\n")
    assert read_literals(file) == {"": [[0], [0, 0]]}


def test_one_of_several_must_be_named():
    found = {"a": 1, "b": 2}
    assert pick(found, "b", "file") == 2
    assert pick({"": 3}, None, "file") == 3
    for name, problem in ((None, "choose one with --name: a, b"), ("c", "holds nothing called 'c'")):
        with pytest.raises(DocumentError, match=problem):
            pick(found, name, "file")
    with pytest.raises(DocumentError, match="holds no list"):
        pick({}, None, "file")
