"""Every code block of README and docs is run, or says in the source why not, and then at least parses.

Blocks of ``python`` and ``bash`` are run, those of a page in order and in one folder. A python block whose
first line is ``# NAME.py`` is also a file there. Before a block, ``<!-- not run: WHY -->`` lets it be, and
``<!-- slow: WHY -->`` leaves it to the slow tests. Before a ``text`` block, ``<!-- as printed -->`` says that
the commands right before it print these lines, numbers about the same.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from freewheel.cli.main import GROUPS, load, main
from freewheel.strategies import ALL

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:<!-- (?P<mark>(?:not run|slow)(?=: )|as printed)[^\n]* -->\n)?^```(?P<kind>\w*)\n(?P<body>.*?)^```$",
    flags=re.M | re.S,
)
PROGRAMS = re.compile(r"^(sudo )?(freewheel|python3?|torchrun|pip|make) ", flags=re.M)


@dataclass
class Block:
    where: str
    kind: str
    body: str
    mark: str | None
    """`slow`: the slow tests run it; `not run`: nobody does."""

    @property
    def commands(self) -> list[list[str]]:
        lines = self.body.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(path: Path) -> list[Block]:
    text = path.read_text()
    return [
        Block(
            f"{path.name}:{text.count(chr(10), 0, found.start('body'))}",
            found["kind"],
            found["body"],
            found["mark"],
        )
        for found in FENCE.finditer(text)
    ]


def run_page(path: Path, monkeypatch, slow: bool = False) -> None:
    """Run what a page shows, in the current folder."""
    said = io.StringIO()
    for block in blocks(path):
        run = block.mark is None or (slow and block.mark == "slow")
        try:
            if block.kind == "python":
                run_python(block, run)
            elif block.kind == "bash":
                said = io.StringIO()
                with contextlib.redirect_stdout(said):
                    for words in block.commands:
                        run_command(words, monkeypatch) if run else parse(words)
            elif block.mark == "as printed":
                printed = said.getvalue().splitlines()
                for line in block.body.splitlines():
                    assert any(alike(line, one) for one in printed), f"not printed: {line!r}, but {printed}"
            else:
                assert not PROGRAMS.search(block.body), "commands belong into a bash block"
        except BaseException as error:
            error.add_note(f"in the block at {block.where}")
            raise


def alike(line: str, other: str) -> bool:
    """The same words, and numbers that differ as two builds of torch may: 2 points, or a fifth."""
    words, others = line.split(), other.split()
    if len(words) != len(others):
        return False
    for one, two, unit in zip(words, others, [*words[1:], ""], strict=True):
        try:
            numbers = float(one), float(two)
        except ValueError:
            if one != two:
                return False
        else:
            if numbers[1] != pytest.approx(numbers[0], **({"abs": 2} if unit == "%" else {"rel": 0.2})):
                return False
    return True


def run_python(block: Block, run: bool) -> None:
    code = compile(block.body, block.where, "exec")
    if not run:
        return
    if name := re.match(r"# (\w+\.py)\n", block.body):
        Path(name[1]).write_text(block.body)
    exec(code, {"__name__": "__main__"})


def run_command(words: list[str], monkeypatch) -> None:
    with monkeypatch.context() as patched:
        if words[0] == "python":
            patched.setattr(sys, "argv", words[1:])
            runpy.run_path(words[1], run_name="__main__")
            return
        assert words[0] == "freewheel", (
            f"{words[0]} is not run here: write <!-- not run: WHY --> before the block"
        )
        patched.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code in (0, None), f"{shlex.join(words)} ended with {left.value.code}"


def parse(words: list[str]) -> None:
    """Read a freewheel command's options, without running it."""
    words = words[1:] if words[0] == "sudo" else words
    words = words[: next((at for at, word in enumerate(words) if word in (">", "|")), None)]
    if words[0] != "freewheel":
        return
    name, *rest = words[1:]
    assert any(name in commands for commands in GROUPS.values()), f"there is no command {name}"
    command = load(name)
    while hasattr(command, "commands"):
        name, *rest = rest
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    command.make_context(name, rest)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_shows_runs(path, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    run_page(path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", [p for p in PAGES if "<!-- slow: " in p.read_text()], ids=lambda p: p.name)
def test_what_takes_long_runs(path, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    run_page(path, monkeypatch, slow=True)


GOOD = "```python\nprint(1)\n```\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```python\nimport freewheel as fw\nfw.simulate('adpsgdd')\n```", "unknown strategy"),
        ("```bash\nfreewheel simulate --no-such-option\n```", "ended with 2"),
        ("```bash\nfreewheel strategies adpsgdd\n```", "ended with 2"),
        ("```bash\nfreewheel strategies &&\nls\n```", "."),
        ("```bash\nls\n```", "not run: WHY"),
        ("```bash\npython train.py\n```", "train.py"),
        ("```\nfreewheel strategies\n```", "bash block"),
        ("```text\nsudo freewheel bench network\n```", "bash block"),
        ("<!-- not run: root -->\n```bash\nsudo freewheel bench network --link-mbitt 100\n```", "link-mbitt"),
        ("<!-- not run: long -->\n```bash\nfreewheel trane\n```", "no command trane"),
        ("<!-- not run: long -->\n```bash\nfreewheel run -n many train.py\n```", "valid integer"),
        ("<!-- as printed -->\n```text\nadpsgd 7\n```", "not printed: 'adpsgd 7'"),
        ("<!-- not run: yours -->\n```python\nwith fw.attach(model) as:\n```", "invalid syntax"),
    ],
)
def test_a_broken_block_is_noticed(text, why, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(GOOD + text + "\n" + GOOD)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BaseException) as failed:  # noqa: PT011  # whatever it raises, the page fails
        run_page(page, monkeypatch)
    assert "page.md:4" in failed.value.__notes__[0] or "page.md:5" in failed.value.__notes__[0]
    message = getattr(failed.value, "message", None) or str(failed.value)
    assert re.search(why, message)


def test_blocks_that_are_not_run_are_few_and_say_why():
    every = [block for path in PAGES for block in blocks(path) if block.kind in ("python", "bash")]
    marked = [block for block in every if block.mark]
    assert len(marked) < len(every) / 3
    marks = [mark for path in PAGES for mark in re.findall("<!-- (?:not run|slow)", path.read_text())]
    assert len(marks) == len(marked)  # none that stands before no block


def test_every_strategy_has_a_page_that_says_its_settings():
    pages = ROOT / "docs" / "strategies"
    assert {path.stem for path in pages.glob("*.md")} == {*ALL, "index"}
    for name, strategy in ALL.items():
        text = (pages / f"{name}.md").read_text()
        rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| .{10,} \|$", text.split("## Settings")[1], flags=re.M)
        assert dict(rows) == {key: str(value) for key, value in vars(strategy()).items()}, name
        for part in ("When to use it", "What it costs", "When a worker is lost", "Try it", "Reference"):
            assert f"## {part}\n" in text, f"{name}: no {part}"


def script(name: str) -> ModuleType:
    """A program of docs/, imported."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_computed_tables_are_up_to_date():
    tables = script("tables")
    for path in sorted(tables.PAGES.glob("*.md")):
        assert len(tables.PART.findall(path.read_text())) == (1 if path.stem == "index" else 2), path
        assert path.read_text() == tables.filled(path), f"{path}: run python docs/tables.py"


def test_every_picture_is_made_by_a_command_and_shown():
    figures = script("figures")
    made = {figures.FOLDER / f"{name}.svg" for name in figures.FIGURES}
    photographed = (ROOT / "benchmarks" / "pictures.py").read_text()
    text = "".join(page.read_text() for page in PAGES)
    found = {path for path in figures.FOLDER.rglob("*") if path.is_file()}
    for path in found | made:
        assert path in made or f'"{path.stem}"' in photographed, f"no command makes {path}"
        assert path in found, f"{path}: run python docs/figures.py"
        assert f"pictures/{path.relative_to(figures.FOLDER)}" in text, f"no page shows {path}"


def test_the_chart_is_drawn_from_the_tables():
    figures = script("figures")
    assert (figures.FOLDER / "straggler.svg").read_text() == figures.straggler().svg(), (
        "run python docs/figures.py"
    )


def test_the_site_has_every_page_and_needs_no_other_host(tmp_path):
    build = pytest.importorskip("mkdocs.commands.build", reason="mkdocs-material comes with the extra dev")
    pytest.importorskip("mkdocstrings_handlers.python", reason="mkdocstrings comes with the extra dev")
    from mkdocs.config import load_config

    build.build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path), strict=True))
    made = {path.relative_to(tmp_path).with_suffix(".md") for path in tmp_path.rglob("*.html")}
    assert made >= {path.relative_to(ROOT / "docs") for path in PAGES[1:]}
    assert not list(tmp_path.rglob("*.py"))
    for path in [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]:
        fetched = r"(?:src|<link[^>]*href)=\"?(?:https?:)?//|url\([\"']?(?:https?:)?//|@import"
        assert not re.search(fetched, path.read_text()), path
