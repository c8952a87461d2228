#!/bin/sh
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
#
# Prints the newest Python that ansible-core runs on and that can make a virtual environment.
# Candidates are run, not only found: a pyenv shim exists for versions that it then refuses to run.
set -eu

usable() {
    "$1" -c 'import sys, ssl, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null
}

for version in 3.14 3.13 3.12 3.11; do
    for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python3; do
        if usable "$candidate"; then
            command -v "$candidate"
            exit 0
        fi
    done
done
if usable python3; then
    command -v python3
    exit 0
fi
echo "No usable Python: need 3.11 to 3.14 with the modules venv, ensurepip and ssl (Debian: apt-get install python3-venv)." >&2
exit 1
