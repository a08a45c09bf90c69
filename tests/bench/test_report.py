"""The report shows every committed row, and nothing that is not in the files."""

import json
import re
import shutil
from html import unescape
from itertools import pairwise
from pathlib import Path

import pytest

from bench.harness import RESULTS, Row, write
from bench.report import LEAST_BARS, MOST_BARS, build, main, picture, read

ROWS = [
    Row("X1", f"case {number} <&>", "time", 1.0 + number, "ms", "other", 2.0, (1.0 + number) / 2.0)
    for number in range(3)
]


def test_every_committed_row_is_shown(tmp_path: Path) -> None:
    page = build(out=tmp_path, figures=False).read_text()
    text = unescape(page)
    cells = set(re.findall(r"<td>(.*?)</td>", text))
    for path in RESULTS.glob("*.json"):
        given = json.loads(path.read_text())
        assert f'id="{path.stem}"' in page
        assert given["date"] in text
        assert given["command"] in text
        assert {row["case"] for row in given["rows"]} <= cells
    assert text.count("<tr>") == sum(
        len(group.rows) + 1 for path in RESULTS.glob("*.json") for group in read(path).groups
    )
    assert "<img" not in page


@pytest.mark.filterwarnings("error")
def test_figures_are_drawn(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "balance.json", tmp_path)
    page = build(tmp_path, tmp_path).read_text()
    figures = re.findall(r'<img src="([^"]+)"', page)
    assert len(figures) == len(set(figures)) == len(list(tmp_path.glob("*.png"))) > 0
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in figures)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("unit", ["ms", ""])
@pytest.mark.parametrize("count", [LEAST_BARS, MOST_BARS, MOST_BARS + 1])
def test_long_labels_leave_room_and_do_not_touch(unit: str, count: int) -> None:
    """Labels longer than any committed one, every third of them short."""
    labels = ["short" if number % 3 == 0 else f"{number} " + "a longer label " * 14 for number in range(count)]
    rows = [Row("X4", label, "time", 1.5, unit, "other", 2.0, 0.75) for label in labels]
    drawn = picture(rows, "a metric with a long name " * 5)
    drawn.draw_without_rendering()
    (axes,) = drawn.axes
    assert axes.get_position().width > 0.4
    frame = drawn.bbox
    texts = [axes.xaxis.label]
    if count <= MOST_BARS:
        texts += axes.get_yticklabels()
        assert [text.get_text().replace("\n", " ") for text in texts[1:]] == [label.strip() for label in labels]
    boxes = [text.get_window_extent() for text in texts]
    assert all(box.x0 >= 0 and box.x1 <= frame.x1 and box.y0 >= 0 and box.y1 <= frame.y1 for box in boxes)
    assert all(above.y0 > below.y1 for above, below in pairwise(boxes[1:]))


@pytest.mark.filterwarnings("error")
def test_the_longest_committed_labels_are_drawn(tmp_path: Path) -> None:
    """Warnings come from Matplotlib when it finds no room."""
    groups = [group for path in RESULTS.glob("*.json") for group in read(path).groups]
    few = [group for group in groups if LEAST_BARS <= len(group.rows) <= MOST_BARS]
    for group in sorted(few, key=lambda group: max(len(row.case) for row in group.rows))[-2:]:
        picture(group.rows, group.metric).savefig(tmp_path / "drawn.png")


def test_values_come_from_the_files(tmp_path: Path) -> None:
    write("unheard_of", ROWS, tmp_path)
    write("replay", [Row("X2", "many", "share", number / 7) for number in range(MOST_BARS + 1)], tmp_path)
    write("layer", ROWS[:1], tmp_path, part="tiny", left_out=["a scheme: not installed"])
    page = unescape(build(tmp_path, tmp_path / "out").read_text())
    assert "one and two GPUs (layer_tiny)" in page
    assert "a scheme: not installed" in page
    assert "unheard_of" in page
    assert "case 2 <&>" in page
    assert '<td class="number">1.5</td>' in page  # the ratio of case 2
    assert page.index("These are replays") > page.index('id="replay"')
    assert page.count("These are replays") == 1
    assert page.index('id="replay"') < page.index('id="unheard_of"')  # known benches first


def test_what_is_no_comparison_is_not_drawn(tmp_path: Path) -> None:
    write("few", ROWS, tmp_path)
    write("none", [Row("X3", str(number), "time", float("nan")) for number in range(LEAST_BARS)], tmp_path)
    assert "<img" not in build(tmp_path, tmp_path / "out").read_text()
    write("enough", [Row("X3", str(number), "time", 1.0) for number in range(LEAST_BARS)], tmp_path)
    assert build(tmp_path, tmp_path / "out").read_text().count("<img") == 1


@pytest.mark.parametrize("content", ["", "[]", '{"rows": []}', '{"rows": [{"bar": 1}]}'])
def test_other_files_are_refused(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.json").write_text(content)
    with pytest.raises(ValueError, match=r"odd\.json: not a results file"):
        build(tmp_path, tmp_path / "out")
    with pytest.raises(SystemExit):
        main(["--results", str(tmp_path), "--out", str(tmp_path / "out")])
    assert "not a results file" in capsys.readouterr().err


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no results files"):
        build(tmp_path, tmp_path / "out")
