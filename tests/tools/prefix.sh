#!/bin/sh
# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Prints where the tests of this checkout put llama.cpp when they cannot keep it in .cache (see prefix() in gates.py).
# A number made of the checkout's path is part of the name: `make clean` must not take what another one uses.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd -P)
sum=$(printf %s "$root" | cksum)
echo "/opt/llamafleet-test-${sum%% *}"
