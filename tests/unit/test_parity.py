# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Facts that stand in two places agree, and the rules that no linter knows are kept."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())
MODULES = sorted((ROOT / "plugins" / "modules").glob("*.py"))
FILTERS = sorted((ROOT / "plugins" / "filter").glob("*.py"))
CORE = sorted((ROOT / "plugins" / "module_utils").glob("*.py"))


def named(path: Path) -> str:
    return path.stem


def load(path: Path) -> Any:
    """The content of a YAML file, or an empty mapping when it is absent or holds nothing."""
    return (yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None) or {}


def constant(path: Path, name: str) -> Any:
    """A YAML document that a plugin assigns to ``name``; an empty mapping when there is none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return yaml.safe_load(ast.literal_eval(node.value)) or {}
    return {}


def own_text() -> dict[str, str]:
    """Every text file that is tracked, or, in a copy without a history, that is there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, text=True)
    names = [name for name in listed.stdout.split("\0") if name]
    if not names:
        names = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".git" not in path.parts]
    texts = {}
    for name in names:
        path = ROOT / name
        if path.is_file() and not name.startswith("tests/output/"):
            try:
                texts[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a binary file
    return texts


def role_options(role: Path) -> dict[str, Any]:
    """All options of a role, over its entry points."""
    options: dict[str, Any] = {}
    for entry in load(role / "meta" / "argument_specs.yml").get("argument_specs", {}).values():
        options.update(entry.get("options") or {})
    return options


@pytest.mark.parametrize("role", ROLES, ids=named)
def test_a_role_has_its_papers(role: Path) -> None:
    missing = [name for name in ("README.md", "meta/main.yml", "meta/argument_specs.yml") if not (role / name).exists()]
    assert not missing, f"roles/{role.name} lacks {', '.join(missing)}"


@pytest.mark.parametrize("role", ROLES, ids=named)
def test_defaults_equal_the_argument_specs(role: Path) -> None:
    defaults, options = load(role / "defaults" / "main.yml"), role_options(role)
    without_default = {name for name, option in options.items() if option.get("required")}
    assert set(defaults) == set(options) - without_default, "names in defaults/main.yml and in meta/argument_specs.yml"
    for name, value in defaults.items():
        computed = isinstance(value, str) and "{{" in value
        # A computed default is told in the description; an empty one may be left unsaid.
        said = options[name].get("default", value if computed or value in (None, "", [], {}) else "nothing")
        assert said == value or (computed and "default" not in options[name]), (
            f"{name}: defaults/main.yml has {value!r}, the argument_specs say {said!r}"
        )


@pytest.mark.parametrize("role", ROLES, ids=named)
def test_variables_of_a_role_carry_its_name(role: Path) -> None:
    public = set(load(role / "defaults" / "main.yml")) | set(role_options(role))
    assert not [name for name in public if not re.match(rf"{role.name}_[a-z0-9]", name)]
    internal = {name for path in (role / "vars").glob("*.yml") for name in load(path)}
    assert not [name for name in internal if not re.match(rf"{role.name}__[a-z0-9]", name)]


@pytest.mark.parametrize("role", ROLES, ids=named)
def test_the_readme_of_a_role_names_its_variables(role: Path) -> None:
    readme = role / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    assert not [name for name in role_options(role) if name not in text]


def test_the_action_group_is_exactly_the_modules() -> None:
    group = load(ROOT / "meta" / "runtime.yml")["action_groups"]["all"]
    assert sorted(group) == sorted(path.stem for path in MODULES)


@pytest.mark.parametrize("module", MODULES, ids=named)
def test_a_module_documents_and_declares_check_mode(module: Path) -> None:
    documentation = constant(module, "DOCUMENTATION")
    fragments = documentation.get("extends_documentation_fragment", [])
    documented = "check_mode" in documentation.get("attributes", {}) or any(
        fragment.startswith("llamafleet.rpc.attributes.") for fragment in fragments
    )
    assert documented, "attributes: check_mode: support"
    declares = "supports_check_mode=True" in module.read_text(encoding="utf-8")
    refuses = documentation.get("attributes", {}).get("check_mode", {}).get("support") == "none"
    assert declares != refuses, "supports_check_mode and the documented check_mode disagree"


@pytest.mark.parametrize("plugin", [*MODULES, *FILTERS], ids=named)
def test_an_edge_stays_thin(plugin: Path) -> None:
    lines = plugin.read_text(encoding="utf-8").splitlines()
    ends = [node.end_lineno or 0 for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.Assign)]
    documents = [
        node.end_lineno or 0
        for node in ast.parse("\n".join(lines)).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("DOCUMENTATION", "EXAMPLES", "RETURN")
    ]
    assert len(documents) == 3, "DOCUMENTATION, EXAMPLES and RETURN"
    assert ends[:3] == documents, "the documentation stands before everything else"
    assert len(lines) - max(documents) < 150, "logic belongs into plugins/module_utils"


@pytest.mark.parametrize("core", CORE, ids=named)
def test_the_core_is_private_and_needs_only_the_standard_library(core: Path) -> None:
    assert core.name.startswith("_")
    imported = set()
    for node in ast.walk(ast.parse(core.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the collection in full"
            imported.add(node.module or "")
    own = "ansible_collections.llamafleet.rpc.plugins.module_utils"
    # psutil is used where it is present, and done without where it is not.
    foreign = [
        name
        for name in imported
        if not name.startswith(own) and name.split(".")[0] not in {*sys.stdlib_module_names, "psutil"}
    ]
    assert not foreign


def test_the_changelog_tells_of_this_version() -> None:
    version = load(ROOT / "galaxy.yml")["version"]
    released = load(ROOT / "changelogs" / "changelog.yaml").get("releases", {})
    assert version in released or list((ROOT / "changelogs" / "fragments").glob("*.yml"))


def test_no_text_names_a_place_of_one_machine_or_a_registry() -> None:
    # In pieces, so that this file does not contain what it looks for.
    places = ["/wo" + "rk/(main|shared|steering)", "/var/tmp/" + "lab", "/ro" + r"ot/(?!\.)", "/fa" + "rm/"]
    registries = ["py" + r"pi\.org", "python" + r"hosted\.org", r"deb\.deb" + r"ian\.org", r"registry\.npm" + "js"]
    pattern = re.compile("|".join(places + registries))
    found = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in own_text().items()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found


def tasks_of(item: Any) -> list[dict[str, Any]]:
    """All plays and tasks of a YAML file, those in blocks too."""
    if isinstance(item, list):
        return [task for one in item for task in tasks_of(one)]
    if not isinstance(item, dict):
        return []
    return [item, *(task for value in item.values() if isinstance(value, list) for task in tasks_of(value))]


def test_what_is_done_once_is_one_for_all_hosts() -> None:
    """Cases B6-06, B6-07: with `serial` run_once means once a batch, and what it sets is set for every host."""
    paths = [*(ROOT / "playbooks").glob("*.yml"), *(ROOT / "roles").glob("*/tasks/*.yml")]
    tasks = [(path, task) for path in paths for task in tasks_of(load(path))]
    assert len(tasks) > 200
    assert not [path for path, task in tasks if "serial" in task]
    set_once = {
        name for _path, task in tasks if task.get("run_once") for name in task.get("ansible.builtin.set_fact", {})
    }
    assert set_once == {
        "llama_mesh__network",
        "llama_preflight__machines",
        "llama_preflight__shared",
        "llamafleet_topology",
    }


def test_facts_are_not_taken_from_variables_of_their_own() -> None:
    """Cases B6-02 and B6-11: with inject_facts_as_vars=false, and no header that another run would write otherwise."""
    magic = {"facts", "check_mode", "diff_mode", "play_hosts", "play_hosts_all", "become"}
    found = {
        f"{path.relative_to(ROOT)}: ansible_{name}"
        for path in [*(ROOT / "playbooks").rglob("*.yml"), *(ROOT / "roles").rglob("*")]
        if path.is_file() and path.suffix in (".yml", ".j2")
        for name in re.findall(r"\bansible_([a-z_]+)", path.read_text(encoding="utf-8"))
        if name not in magic
    }
    assert not found
    assert "inject_facts_as_vars = false" in (ROOT / "ansible.cfg").read_text(encoding="utf-8")


def test_a_conditional_that_is_no_boolean_stays_an_error() -> None:
    """Case B6-01: ansible-core 2.19 and later find it in every run, the scenarios' too, unless that is switched off."""
    off = "allow_broken_" + "conditionals"
    assert not [name for name, text in own_text().items() if off in text.lower()]


def test_each_make_command_that_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    documents = {name: text for name, text in own_text().items() if name.endswith(".md")}
    unknown = {
        f"{name}: make {command}"
        for name, text in documents.items()
        for command in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)
        if command not in targets
    }
    assert not unknown


def test_each_playbook_that_the_readme_names_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named_playbooks = set(re.findall(r"playbooks/[a-z_]+\.yml", text))
    assert named_playbooks
    assert not [name for name in named_playbooks if not (ROOT / name).exists()]
