"""The files in deploy/ are what their own tools accept, and start commands that exist."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from treeopt.cli.profile import app

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = ("treeopt-watch.service", "treeopt-watch-once.service", "treeopt-watch-once.timer")


def commands() -> list[str]:
    manifest = yaml.safe_load((DEPLOY / "kubernetes-cronjob.yaml").read_text())
    container = manifest["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"][0]
    found = [" ".join(container["command"])]
    for name in (*UNITS[:2], "treeopt.cron"):
        text = (DEPLOY / name).read_text()
        found += re.findall(r"(?:ExecStart=|\* )\"?\S*(treeopt\"? profile [^\n|0-9]*)", text)
    return [line.replace('"', "").strip() for line in found]


def test_every_file_starts_a_command_that_exists() -> None:
    starts = commands()
    assert len(starts) == 4
    for line in starts:
        program, group, *words = line.split()
        assert (program, group) == ("treeopt", "profile")
        help_text = CliRunner().invoke(app, [words[0], "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
        assert help_text.exit_code == 0
        assert all(word in help_text.output for word in words[1:])


@pytest.mark.parametrize("unit", UNITS)
def test_systemd_accepts_the_units(unit: str, tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze here")
    binary = tmp_path / ".local" / "bin" / "treeopt"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    done = subprocess.run(
        [program, "verify", "--user", DEPLOY / unit],
        env={**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "Failed to initialize manager" in done.stderr:
        pytest.skip("systemd-analyze cannot check units in this container")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_cron_line_has_five_fields_and_logs() -> None:
    (line,) = [text for text in (DEPLOY / "treeopt.cron").read_text().splitlines() if not text.startswith("#")]
    minute, *others, command = line.split(None, 5)
    assert minute == "*/15"
    assert others == ["*"] * 4
    assert "%" not in command, "cron turns % into a new line"


def test_the_manifest_runs_one_worker_at_a_time() -> None:
    manifest = yaml.safe_load((DEPLOY / "kubernetes-cronjob.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("batch/v1", "CronJob")
    spec = manifest["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert len(spec["schedule"].split()) == 5
    pod = spec["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_kubectl_reads_the_manifest(tmp_path: Path) -> None:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("no kubectl here")
    shutil.copy(DEPLOY / "kubernetes-cronjob.yaml", tmp_path)
    (tmp_path / "kustomization.yaml").write_text("resources: [kubernetes-cronjob.yaml]\n")
    done = subprocess.run([program, "kustomize", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["kind"] == "CronJob"
