"""The demo model's cache heals itself; no test but the last, marked, one fetches anything."""

import hashlib
import json
import multiprocessing
import zipfile
from pathlib import Path

import pytest

from ppd_runtime import demo_model
from ppd_runtime.demo_model import demo_model_folder
from treeopt.errors import ModelError

GGUF = b"weights of a model" * 100


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder of its own, a tiny pinned file and a conversion that only copies."""
    monkeypatch.setenv("TREEOPT_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_model, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(demo_model, "_installed_gguf", lambda: None)
    monkeypatch.setattr(demo_model, "_download_wheel", lambda work, report: make_wheel(work, GGUF))
    monkeypatch.setattr(demo_model, "_write_model", write_model)
    return tmp_path


def make_wheel(work: Path, content: bytes) -> Path:
    wheel = work / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{demo_model.PACKAGE}/{demo_model.GGUF_NAME}", content)
    return wheel


def write_model(gguf: Path, work: Path, report: demo_model.Progress) -> None:
    report("converting", 0.5)
    work.mkdir()
    (work / "config.json").write_text("{}")
    (work / "model.safetensors").write_bytes(gguf.read_bytes())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model_is_made_once(cache, monkeypatch):
    said = []
    folder = demo_model_folder(lambda what, share: said.append((what, share)))
    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert said == [("converting", 0.5)]
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, "demo.lock"], "nothing left behind"
    monkeypatch.setattr(demo_model, "_fetch", None)  # calling it again would fail
    assert demo_model_folder() == folder


@pytest.mark.parametrize("damage", ["missing", "cut", "altered", "no manifest", "broken manifest", "empty manifest"])
def test_a_damaged_model_is_made_again(cache, damage):
    folder = demo_model_folder()
    whole = contents(folder)
    weights, manifest = folder / "model.safetensors", folder / demo_model.MANIFEST
    if damage == "missing":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(GGUF[:-1])
    elif damage == "altered":
        weights.write_bytes(b"W" + GGUF[1:])
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text({"broken manifest": '{"files', "empty manifest": '{"files": {}}'}[damage])
    assert contents(demo_model_folder()) == whole


@pytest.mark.parametrize("stage", ["_download_wheel", "_write_model"])
def test_an_interrupted_making_is_made_again(cache, monkeypatch, stage):
    def interrupted(*arguments):
        (arguments[0] if stage == "_download_wheel" else arguments[1].parent).joinpath("half").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as once:
        once.setattr(demo_model, stage, interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo_model_folder()
    folder = demo_model_folder()
    assert (folder / "model.safetensors").read_bytes() == GGUF
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, "demo.lock"]


def test_another_file_under_the_same_name_is_refused(cache, monkeypatch):
    monkeypatch.setattr(demo_model, "_download_wheel", lambda work, report: make_wheel(work, b"something else"))
    with pytest.raises(ModelError, match="not the pinned"):
        demo_model_folder()
    assert [path.name for path in (cache / "models").iterdir()] == ["demo.lock"]


def test_an_installed_package_is_used_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "site" / "demo_package_of_a_test"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / demo_model.GGUF_NAME).write_bytes(GGUF)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(demo_model, "PACKAGE", package.name)
    assert demo_model._installed_gguf() == package / demo_model.GGUF_NAME


def test_without_pip_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TREEOPT_CACHE", str(tmp_path))
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="ensurepip"):
        demo_model_folder()


def test_a_failed_download_says_why(tmp_path, monkeypatch):
    """pip is asked for a package that no index has, from no index at all."""
    monkeypatch.setenv("TREEOPT_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setattr(demo_model, "REQUIREMENT", "no-such-package-of-treeopt==0")
    monkeypatch.setattr(demo_model, "PACKAGE", "no_such_package_of_treeopt")
    with pytest.raises(ModelError, match="No matching distribution"):
        demo_model_folder()
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["demo.lock"]


def _make_in_process(results) -> None:
    results.put(contents(demo_model_folder())["model.safetensors"] == GGUF)


def test_two_processes_at_once_make_one_model(cache, monkeypatch):
    context = multiprocessing.get_context("fork")
    made = context.Value("i", 0)

    def counted(gguf, work, report):
        with made.get_lock():
            made.value += 1
        write_model(gguf, work, report)

    monkeypatch.setattr(demo_model, "_write_model", counted)
    results = context.Queue()
    processes = [context.Process(target=_make_in_process, args=(results,)) for _ in range(3)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert outcomes == [True] * 3
    assert made.value == 1


@pytest.mark.demo_model
def test_the_demo_model_speaks_with_its_chat_template():
    from ppd_runtime import hf
    from ppd_runtime.models import load_model

    loaded = load_model("demo", kernels="own")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = loaded.model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert loaded.tokenizer.decode(out, skip_special_tokens=True) == "The capital of France is Paris."
    assert int(out[-1]) in hf.eos_token_ids(loaded.model) == frozenset({2})
    assert loaded.context_limit == 8192
    manifest = json.loads((demo_model_folder() / demo_model.MANIFEST).read_text())
    assert manifest["gguf_sha256"] == demo_model.GGUF_SHA256
