# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stands in for the get-pip script that ansible-test would otherwise download from outside the package index.

ansible-test calls it as ``get_pip.py pip==VERSION [--no-setuptools] [--no-wheel] ...``. pip comes from the
interpreter's own ensurepip, and from there on the asked version from the index that pip is configured for.
"""

from __future__ import annotations

import subprocess
import sys

# In a child process: ensurepip sets PIP_CONFIG_FILE to /dev/null in the process that calls it, and pip would
# then know neither the index nor the certificates of this machine.
subprocess.check_call([sys.executable, "-m", "ensurepip"])
# The switches are get-pip's own: it would also install setuptools and wheel.
arguments = [argument for argument in sys.argv[1:] if argument not in ("--no-setuptools", "--no-wheel")]
sys.exit(subprocess.call([sys.executable, "-m", "pip", "install", *arguments]))
