"""The command line: what users wrote is printed as it is, and bad input ends in one line, before any work."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

from marble import Layout, Span
from marble.cli import main

ONE = Layout([[Span("causal", 40)]])


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The line that a command ends with; it printed nothing else."""
    monkeypatch.setattr(sys, "argv", ["marble", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert out == ""
    (line,) = [line for line in err.splitlines() if "error" in line]
    return line.removeprefix("error ").strip()


@pytest.mark.parametrize("name", ["[/x]", "data[red].json", ":b:"])
def test_names_are_printed_as_they_are(name, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert refusal(monkeypatch, capsys, "workload", name).startswith(f"source: {name!r} is neither a workload")
    (tmp_path / "[b]").mkdir()
    path = tmp_path / "[b]" / name.replace("/", "")
    path.write_text(ONE.to_json())
    monkeypatch.setattr(sys, "argv", ["marble", "workload", f"[b]/{path.name}"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert f"[b]/{path.name}: 40 tokens" in capsys.readouterr().out


BAD = {
    "layout in brackets": (["workload", "bad.json"], 'expected {"samples": [[[mode, length]'),
    "shape": (["plan", "one.json", "--shape", "a:b:c"], "got 'a:b:c'"),
    "layout not text": (["workload", "bytes.json"], "source: 'bytes.json' is not a text file in UTF-8"),
    "profile not text": (["replay", "one.json", "--profile", "bytes.json"], "profile: 'bytes.json' is not a text file"),
    "schedule": (["plan", "one.json", "--schedule", "rnig"], "schedule: 'rnig' is neither one of ring, "),
    "replayed schedule": (
        ["replay", "one.json", "--schedule", "rnig"],
        "schedule: 'rnig' is unknown; use one of 'ring'",
    ),
    "replayed order": (["replay", "one.json", "--order", "x"], "order: 'x' is unknown; use one of 'ptrr'"),
    "no folder": (["workload", "one.json", "--out", "none/x.json"], "out: the folder 'none' does not exist"),
    "a folder": (["workload", "one.json", "--out", "."], "out: '.' is a folder; name a file"),
    "fit into no folder": (["fit", "none/x.toml"], "out: the folder 'none' does not exist"),
    "picture in no folder": (["show", "one.json", "--out", "none/x.png"], "out: the folder 'none' does not exist"),
    "picture of no kind": (["show", "one.json", "--out", "x"], "out: expected a name that ends in one of .png"),
}


@pytest.mark.parametrize(("words", "message"), BAD.values(), ids=BAD)
def test_one_line_says_what_is_wrong(words, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("one.json").write_text(ONE.to_json())
    Path("bad.json").write_text('{"samples": [1]}')
    Path("bytes.json").write_bytes(b"\xff\xfe\x00")
    assert message in refusal(monkeypatch, capsys, *words)
