#!/bin/sh
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
#
# venv.sh REQUIREMENTS_FILE: prints the directory of a virtual environment that holds exactly these requirements,
# and makes it first where it is missing. Its name carries a hash of the requirements, of the Python and of the
# place, so a change of any of them makes a new one and a finished one is used as it is.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
cd "$root"
python=$(sh tests/tools/find_python.sh)
key=$("$python" - "$1" requirements.txt <<'PYTHON'
import hashlib, os, sys
digest = hashlib.sha256(f"{sys.version} {sys.executable} {os.getcwd()}".encode())
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        digest.update(file.read())
print(digest.hexdigest()[:12])
PYTHON
)
venv=$root/.cache/venv/$(basename "$1" .txt)-$key

# The mark is written last: an environment without it was interrupted and is made anew.
if [ ! -e "$venv/.complete" ]; then
    echo "Setting up $1 for $("$python" --version) in .cache/venv (once) ..." >&2
    rm -rf "$venv"
    "$python" -m venv "$venv" >&2
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -r "$1" >&2
    touch "$venv/.complete"
fi
echo "$venv"
