"""The documents name what exists: files, links, keys, packages, and the direction of imports."""

import ast
import configparser
import re
from pathlib import Path

import pytest

DOCS = [Path("README.md"), *sorted(Path("docs").glob("*.md"))]
ELSEWHERE = ("tests/test.sh", "configs/sites/NAME")  # a file of every task folder; a placeholder


@pytest.mark.parametrize("doc", DOCS, ids=str)
def test_files_and_links_named_in_a_document_exist(doc):
    text = doc.read_text()
    named = re.findall(r"`((?:miles|tools|configs|docs|slurm|jobs|tests)/[\w./{}*-]+)", text)
    links = [str((doc.parent / link).as_posix()) for link in re.findall(r"\]\(((?!https?:)[^)#]+)", text)]
    missing = [name for name in named + links if "*" not in name and not Path(name.rstrip("/")).exists() and not name.startswith(ELSEWHERE)]
    assert missing == []


def test_tests_named_in_a_document_exist():
    defined = {name for path in Path("tests").rglob("test_*.py") for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)}
    named = {(str(doc), name) for doc in DOCS for name in re.findall(r"`(test_\w+)`", doc.read_text())}
    assert {pair for pair in named if pair[1] not in defined} == set()
    assert len(named) > 40, "docs/faults.md names one for each of its rows"


def test_options_named_with_their_section_exist():
    reference = Path("docs/config.md").read_text()
    keys = {
        f"{section}.{key}"
        for section, body in re.findall(r"^## \[([\w.]+)\]\n(.*?)(?=^#|\Z)", reference, re.MULTILINE | re.DOTALL)
        for key in re.findall(r"^\| `(\w+)`", body, re.MULTILINE)
    }
    sections = {k.rsplit(".", 1)[0] for k in keys}
    for doc in DOCS:
        for name in re.findall(
            r"`((?:run|model|tasks|rollout|engine|buffer|trainer|algorithm|weights|checkpoint|cluster)\.[\w.]+)", doc.read_text()
        ):
            if doc.name != "report.md":  # its keys are the report's
                assert name in keys or name in sections or any(k.startswith(name + ".") for k in keys), f"{doc}: {name}"


def test_every_required_package_has_its_reason():
    setup = configparser.ConfigParser()
    setup.read("setup.cfg")
    packages = [
        re.split(r"[ =<>]", line)[0] for line in setup["options"]["install_requires"].split("\n") if line and not line.startswith("#")
    ]
    text = Path("docs/dependencies.md").read_text()
    assert [p for p in packages if not re.search(rf"(?:^\| |, ){re.escape(p)}[ ,]", text, re.MULTILINE)] == []


def test_pins_in_the_table_are_those_that_are_installed():
    pins = dict(
        re.findall(
            r"^([\w.-]+)==(\S+)$", "\n".join(p.read_text() for p in Path("tools").glob("requirements-cpu*.txt")).lower(), re.MULTILINE
        )
    )
    rows = re.findall(r"^\| ([\w, -]+?) \| ([\d., ]+) \|", Path("docs/dependencies.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    for names, versions in rows:
        assert [pins[n.lower()] for n in names.split(", ")] == versions.split(", "), names


def test_imports_point_upwards_in_the_table_of_packages():
    order = re.findall(r"^\| `miles\.(\w+)` \|", Path("docs/architecture.md").read_text(), re.MULTILINE)
    assert sorted(order) == sorted(p.parent.name for p in Path("miles").glob("*/__init__.py"))
    wrong = []
    for path in Path("miles").glob("*/**/*.py"):
        package = path.parts[1]
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            used = {n.split(".")[1] for n in names if n.startswith("miles.")} & set(order)
            wrong += [f"{path} imports miles.{u}" for u in used if order.index(u) > order.index(package)]
    assert wrong == []
