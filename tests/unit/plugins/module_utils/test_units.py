# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a service manager reads back from our text is what was meant, whatever is in the arguments (law 16)."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.llamafleet.rpc.plugins.module_utils._units import (
    Service,
    UnitError,
    supervisor_main,
    supervisor_program,
    systemd_unit,
)
from hypothesis import given
from hypothesis import strategies as st

NASTY = [
    "/opt/a b/bin/x",
    "100%",
    "%h",
    "$HOME",
    "${PATH}",
    'say "hi"',
    "it's",
    "back\\slash",
    "a ;b",
    "a #b",
    "; x",
    "",
    "ä€",
    "a\u00a0b",
]
words = st.text(st.characters(blacklist_categories=("Cc", "Cs")), max_size=20)


def systemd_words(line: str) -> list[str]:
    """systemd.syntax(7) read on its own: double-quoted words, backslash escapes, then %% and $$."""
    found, word, quoted, position = [], "", False, 0
    while position < len(line):
        character = line[position]
        if character == '"':
            quoted = not quoted
            if not quoted:
                found.append(word)
                word = ""
        elif character == "\\":
            position += 1
            word += line[position]
        elif quoted:
            word += character
        position += 1
    assert not quoted
    for word in found:
        assert "%" not in word.replace("%%", "") and "$" not in word.replace("$$", "")
    return [word.replace("%%", "%").replace("$$", "$") for word in found]


def lines_of(text: str, key: str) -> list[str]:
    return [line[len(key) + 1 :] for line in text.splitlines() if line.startswith(key + "=")]


def supervisor_words(text: str) -> list[str]:
    """The way supervisor 4.3 reads a command: its configparser settings, % expansion, shlex."""
    parser = configparser.RawConfigParser(inline_comment_prefixes=(";", "#"), strict=False)
    parser.read_string(text)
    section = parser.sections()[0]
    return shlex.split(parser.get(section, "command") % {})


@given(st.lists(words, max_size=5), words)
def test_arguments_survive_every_manager(arguments: list[str], value: str) -> None:
    service = Service("llama-x", "d", ("/bin/x", *arguments), {"A": value})
    unit = systemd_unit(service, "system")
    assert systemd_words(lines_of(unit, "ExecStart")[0]) == ["/bin/x", *arguments]
    program = supervisor_words(supervisor_program(service))
    assert program == ["/usr/bin/env", f"A={value}", "/bin/x", *arguments]


def test_nasty_arguments_survive_every_manager() -> None:
    service = Service("llama-x", "100% of it", ("/opt/a b/x", *NASTY), {"A": 'x "y" %z $w'})
    unit = systemd_unit(service, "user")
    assert systemd_words(lines_of(unit, "ExecStart")[0]) == ["/opt/a b/x", *NASTY]
    assert lines_of(unit, "Environment") == ['"A=x \\"y\\" %%z $w"']
    assert lines_of(unit, "Description") == ["100%% of it"]
    assert supervisor_words(supervisor_program(service))[2:] == ["/opt/a b/x", *NASTY]


@pytest.mark.real
def test_supervisor_itself_reads_the_command(tmp_path: Path) -> None:
    from supervisor import options  # only where requirements-dev.txt is installed, as for every real test

    configuration = supervisor_main(str(tmp_path))
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "supervisord.conf").write_text(configuration)
    service = Service("llama-x", "d", ("/bin/echo", *NASTY), {"A": "b c"}, log_path=str(tmp_path / "100%.log"))
    (tmp_path / "conf.d" / "llama-x.conf").write_text(supervisor_program(service), encoding="utf-8")
    server = options.ServerOptions()
    server.realize(args=["-c", str(tmp_path / "supervisord.conf")])
    program = server.process_group_configs[0].process_configs[0]
    assert shlex.split(program.command) == ["/usr/bin/env", "A=b c", "/bin/echo", *NASTY]
    assert program.stdout_logfile == str(tmp_path / "100%.log")
    assert program.startsecs == 0 and program.autorestart is not False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"argv": ("relative",)}, "absolute path"),
        ({"argv": ("/x", "a\nExecStartPre=/bin/evil")}, "control character"),
        ({"environment": {"A": "x\ny"}}, "control character"),
        ({"environment": {"A B": "x"}}, "no name of an environment variable"),
        ({"name": "../x"}, "service name"),
        ({"backend": "tpu"}, "backend 'tpu'"),
    ],
)
def test_what_no_manager_can_hold_is_refused(changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"name": "llama-x", "description": "d", "argv": ("/x",), **changes}
    with pytest.raises(UnitError, match=message):
        Service(**values)


def test_a_worker_that_ends_with_status_0_comes_back_and_is_never_parked() -> None:
    """Law 8: exit 0 of a worker is a failure; case B4-15."""
    unit = systemd_unit(Service("w", "d", ("/x",)), "system")
    assert lines_of(unit, "Restart") == ["always"]
    assert lines_of(unit, "StartLimitIntervalSec") == ["0"]
    assert lines_of(unit, "IgnoreSIGPIPE") == ["yes"]
    assert lines_of(unit, "RestartMaxDelaySec") == []  # which systemd 252 does not know
    assert lines_of(systemd_unit(Service("w", "d", ("/x",)), "system", rising=True), "RestartMaxDelaySec") == ["60"]
    program = supervisor_program(Service("w", "d", ("/x",)))
    assert "autorestart=true" in program and "startsecs=0" in program


def test_directory_too_long_for_a_socket_is_refused() -> None:
    with pytest.raises(UnitError, match="shorter llama_fleet_prefix"):
        supervisor_main("/" + "x" * 90)


@pytest.mark.parametrize(("backend", "threshold"), [("cpu", 15), ("cuda", 20), ("rocm", 20), ("vulkan", 20)])
def test_exposure_of_system_units(backend: str, threshold: int, tmp_path: Path) -> None:
    """Law 11: systemd-analyze security, offline, gives at most 1.5 for a CPU unit and 2.0 for a GPU unit."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not on this machine; .ci/run installs systemd")
    service = Service("llama-x", "d", ("/bin/true",), user="daemon", backend=backend)
    path = tmp_path / "llama-x.service"
    path.write_text(systemd_unit(service, "system"))
    command = [analyze, "security", "--offline=true", f"--threshold={threshold}", "--no-pager", str(path)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr
    verified = subprocess.run([analyze, "verify", "--man=no", str(path)], check=False, capture_output=True, text=True)
    assert verified.stderr == "" and verified.returncode == 0, verified.stderr
