"""Rules about the code itself: the map, the public names, the documentation that is run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forked
import freewheel
from freewheel.strategies import ALL

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "freewheel"
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/DESIGN.md")]


def test_the_map_names_every_room():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    packages = {p.parent for p in SOURCE.glob("*/__init__.py")} | {*(SOURCE / "runtime").glob("[a-z]*")}
    rooms = {f"src/freewheel/{p.relative_to(SOURCE)}/" for p in packages - {SOURCE / "runtime"} if p.is_dir()}
    rooms |= {f"src/freewheel/{p.name}" for p in SOURCE.glob("*.py")}
    rooms |= {f"src/{p.name}" for p in SOURCE.parent.glob("*.py")}
    rooms |= {f"tests/{p.parent.name}" for p in (ROOT / "tests").glob("*/test_*.py")}
    rooms |= {f"benchmarks/{p.parent.name}/" for p in (ROOT / "benchmarks").glob("*/__init__.py")}
    named = set(re.findall(r"`((?:src|tests|benchmarks)/[\w/.]+)`", text))
    assert named == rooms


def test_the_public_names_are_listed_and_exist():
    assert len(set(freewheel.__all__)) == len(freewheel.__all__)
    for name in freewheel.__all__:
        assert getattr(freewheel, name) is not None
    assert {strategy.__name__ for strategy in ALL.values()} <= set(freewheel.__all__)


def test_importing_stays_light():
    heavy = ["sklearn", "plotly", "networkx", "typer", "rich", "lightning", "transformers", "accelerate"]
    by_torch = "by_torch = [m for m in ['networkx'] if m in sys.modules]"  # torch may bring it along
    loaded = f"[m for m in {heavy} if m in sys.modules and m not in by_torch]"
    code = f"import sys, torch; {by_torch}; import freewheel; print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == []


@pytest.mark.parametrize(("name", "needs"), [("lightning", "lightning"), ("transformers", "accelerate")])
def test_an_engine_that_is_not_installed_is_named(name, needs):
    block = f"import sys; sys.modules.update({{'{needs}': None, 'pytorch_lightning': None}}); "
    done = forked.run("-c", f"{block}import freewheel.{name}", timeout=60)
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"freewheel.errors.NotInstalled: freewheel.{name} needs ")
    assert said.endswith(f"pip install 'freewheel[{name}]'.")
    assert len(said.split()) <= 30


def test_strategies_know_no_time_and_no_randomness_of_their_own():
    allowed = {"__future__", "asyncio", "collections", "dataclasses", "freewheel", "math", "torch", "typing"}
    allowed.add("zlib")
    for path in (SOURCE / "strategies").glob("[!_]*.py"):
        assert "asyncio.sleep" not in path.read_text()
        tree = ast.parse(path.read_text())
        imported = {
            name.split(".")[0]
            for node in ast.walk(tree)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert imported <= allowed, path
        assert "torch.distributed" not in path.read_text()


def test_one_strategy_a_file():
    for name, strategy in ALL.items():
        assert strategy.__module__ == f"freewheel.strategies.{name}"


@pytest.mark.parametrize("name", ALL)
def test_a_strategy_is_documented_and_its_example_runs(name):
    strategy = ALL[name]
    text = strategy.__doc__ or ""
    for part in ("Late, lost and doubled messages:", "Example:", "Reference:"):
        assert part in text, f"{name}: no {part}"
    settings = set(vars(strategy()))
    own = {field for field in settings if field in strategy.__annotations__}
    for field in own:
        assert re.search(rf"\b{field}\b", text), f"{name}: the setting {field} is not explained"
    runner = doctest.DocTestRunner(verbose=False)
    for test in doctest.DocTestFinder(recurse=False).find(strategy, name, globs={}):
        assert test.examples
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0


def test_what_users_call_is_documented():
    """Public functions, and methods of public classes; a strategy's may have Strategy's docstring."""
    for name in freewheel.__all__:
        public = getattr(freewheel, name)
        assert public.__doc__, f"{name} has no docstring"
        if not inspect.isclass(public) or issubclass(public, freewheel.FreewheelError):
            continue
        for key, member in inspect.getmembers(public):
            function = getattr(member, "fget", getattr(member, "func", getattr(member, "__func__", member)))
            ours = inspect.isfunction(function) and function.__module__.startswith("freewheel.")
            if ours and not key.startswith("_"):
                assert inspect.getdoc(member), f"{name}.{key} has no docstring"


def test_the_example_of_simulate_runs():
    assert doctest.testmod(importlib.import_module("freewheel.api")).failed == 0


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), flags=re.S)


COMMANDS = [
    line for block in blocks(ROOT / "README.md", "bash") for line in block.replace("\\\n", " ").splitlines()
]


def test_the_readme_has_exactly_two_set_up_commands():
    assert [line for line in COMMANDS if line.startswith("make ")] == ["make demo", "make test"]


def test_the_docs_name_every_strategy_and_every_dependency():
    project = (ROOT / "pyproject.toml").read_text()
    needed = re.findall(r'^    "([\w-]+)[<>=]', project.split("optional-dependencies")[0], flags=re.M)
    assert len(needed) >= 7
    pages = {"strategies/index.md": ALL, "INSTALL.md": needed}
    for page, names in pages.items():
        text = (ROOT / "docs" / page).read_text()
        for name in names:
            assert f"`{name}`" in text, f"docs/{page} does not name `{name}`"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 125


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert link.startswith("http") or (path.parent / link).exists(), f"{path.name}: {link}"


def test_contributing_s_example_is_a_strategy_that_works():
    text = re.search(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.S)
    lines = [line[3:] for line in text.group(1).splitlines()]
    scope = {"dataclass": __import__("dataclasses").dataclass, "Strategy": freewheel.Strategy}
    scope["at_least"] = freewheel.errors.at_least
    exec(compile("\n".join(lines), "CONTRIBUTING.md", "exec"), scope)
    result = freewheel.simulate(scope["Swarm"](every=2), "quadratic", workers=4, steps=300)
    assert result.loss < 0.2  # from 40


def modules() -> dict[str, ast.Module]:
    """Every module by its dotted name, parsed."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text())
    return found


def test_classes_and_functions_are_one_idea():
    """A class has at most 300 lines, a function 60; outside of the command line it takes 10 things."""
    large = set()

    def look(node: ast.AST, where: str) -> None:
        for inner in ast.iter_child_nodes(node):
            if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name, most = f"{where}.{inner.name}", 300 if isinstance(inner, ast.ClassDef) else 60
                taken = [] if isinstance(inner, ast.ClassDef) else [*inner.args.args, *inner.args.kwonlyargs]
                takes = sum(one.arg not in ("self", "cls") for one in taken)
                if inner.end_lineno - inner.lineno >= most or takes > 10:
                    large.add(name)
                look(inner, name)

    for module, tree in modules().items():
        if not module.startswith("freewheel.cli"):
            look(tree, module)
    assert not large


def test_modules_know_each_other_in_one_direction():
    """Not even for types. The package itself is imported by the commands and functions people call."""
    parsed = modules()
    knows = {name: set[str]() for name in parsed}
    for name, tree in parsed.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                knows[name].update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                knows[name].update(full & parsed.keys() or {node.module or ""})
    knows.pop("freewheel")
    reached = {name: others & knows.keys() - {name} for name, others in knows.items()}
    for _ in knows:
        grown = {name: others.union(*(reached[one] for one in others)) for name, others in reached.items()}
        if grown == reached:
            break
        reached = grown
    both = {
        (one, other) for one in reached for other in reached[one] if one < other and one in reached[other]
    }
    assert not both
