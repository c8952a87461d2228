# Copyright (c) 2026, llamafleet contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The collection against a real NVIDIA card: detect, build, probe, plan, answer, compare; one JSON of what came out.

For a Linux machine with an NVIDIA card, its driver, nvcc, cmake and Python 3.9 or later, and no network. Nothing is
installed and everything that is started ends with the script. Give it the llama.cpp sources, a model and this
collection; it writes the JSON in any case, also of what failed, and ends with 0 only if all of it went well.
--dry-run-cpu does the same with CPU workers and the programs in LLAMAFLEET_TEST_BIN, to test the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable

HOST = "127.0.0.1"
TARGETS = ("ggml-rpc-server", "llama-server")
KEEP_FOR_CHECKS = 90.0  # seconds of the deadline that the build must leave


class CheckError(Exception):
    """A step did not come out as it must; the text goes into the JSON."""


def free_port() -> int:
    """A port below the range that outgoing connections are given."""
    while True:
        port = random.randint(20000, 32000)
        with socket.socket() as trial:
            try:
                trial.bind((HOST, port))
            except OSError:
                continue
            return port


def output_of(argv: Sequence[str], timeout: float = 30.0) -> str:
    """What a program says on both streams; its error where it cannot be run."""
    try:
        done = subprocess.run(list(argv), capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return done.stdout + done.stderr


@contextmanager
def running(argv: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a group of its own, ended with all that it started."""
    with log.open("wb") as into:
        process = subprocess.Popen(
            list(argv),
            stdout=into,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Check:
    """One run: ``report`` grows with each step and is what is written."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.work = work
        self.started = time.monotonic()
        self.report: dict[str, Any] = {"schema": 1, "ok": False, "dry_run": options.dry_run_cpu, "steps": {}}
        self.facts: dict[str, Any] = {}
        self.bin = Path()
        self.model: dict[str, Any] = {}

    def left(self) -> float:
        """Seconds until the deadline."""
        return float(self.options.deadline) - (time.monotonic() - self.started)

    def step(self, name: str, work: Callable[[], Any]) -> None:
        """Do one step and put into the report what it gave and how long it took; CheckError ends the run."""
        begin = time.monotonic()
        sys.stderr.write(f"{name} ...\n")
        entry: dict[str, Any] = {"ok": False}
        self.report["steps"][name] = entry
        try:
            entry["result"] = work()
            entry["ok"] = True
        finally:
            entry["seconds"] = round(time.monotonic() - begin, 2)

    # ------------------------------------------------------------------------------------------------- the steps

    def machine(self) -> dict[str, Any]:
        """What the machine's own tools say, raw."""
        smi = "nvidia-smi --query-gpu=index,name,compute_cap,driver_version,memory.total,memory.free --format=csv"
        return {
            "nvidia_smi": output_of(smi.split()),
            "nvcc": output_of(["nvcc", "--version"]),
            "cmake": output_of(["cmake", "--version"]).splitlines()[:1],
            "kernel": os.uname().release,
            "cpus": os.cpu_count(),
        }

    def host_facts(self) -> dict[str, Any]:
        """The facts that the module host_facts would return; on a machine with a card they must have it."""
        from ansible_collections.llamafleet.rpc.plugins.module_utils._hosts import Own, collect, identify
        from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner

        self.facts = collect(SystemRunner(), identify(), "cpu" if self.options.dry_run_cpu else "cuda", Own()).to_dict()
        return self.facts

    def build(self) -> dict[str, Any]:
        """The two programs, for this card only."""
        if self.options.dry_run_cpu:
            self.bin = Path(os.environ["LLAMAFLEET_TEST_BIN"])
            return {"bin": "LLAMAFLEET_TEST_BIN"}
        from ansible_collections.llamafleet.rpc.plugins.module_utils._builds import base_switches
        from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner

        source = self._sources()
        tree = self.work / "tree"
        nvcc = SystemRunner().which("nvcc")
        if nvcc is None:
            raise CheckError("there is no nvcc: install the CUDA toolkit, or put its bin directory into PATH")
        switches = [*base_switches(self.options.build), *self.facts["cmake_flags"], f"-DCMAKE_CUDA_COMPILER={nvcc}"]
        ninja = ["-G", "Ninja"] if output_of(["ninja", "--version"])[:1].isdigit() else []
        self._must("cmake", ["cmake", "-S", str(source), "-B", str(tree), *ninja, *switches])
        jobs = str(os.cpu_count() or 1)
        self._must("make", ["cmake", "--build", str(tree), "--parallel", jobs, "--target", *TARGETS])
        self.bin = tree / "bin"
        return {"switches": switches, "version": output_of([str(self.bin / "llama-server"), "--version"])}

    def _sources(self) -> Path:
        with tarfile.open(self.options.source) as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(self.work / "source", filter="data")
            else:
                archive.extractall(self.work / "source")  # noqa: S202  no filter in this Python; the operator gave the archive
        found = sorted((self.work / "source").glob("**/ggml/src/ggml-rpc"), key=lambda path: len(path.parts))
        if not found:
            raise CheckError(f"{self.options.source} holds no ggml/src/ggml-rpc: it is no llama.cpp source archive")
        return found[0].parents[2]

    def _must(self, name: str, argv: Sequence[str]) -> None:
        log = self.work / f"{name}.log"
        with running(argv, {}, log) as process:
            try:
                status: int | None = process.wait(max(1.0, self.left() - KEEP_FOR_CHECKS))
            except subprocess.TimeoutExpired:
                status = None
        if status != 0:
            why = "took too long" if status is None else f"ended with {status}"
            raise CheckError(f"{name} {why}: {_tail(log)}")

    def list_devices(self) -> str:
        """What llama.cpp itself sees here."""
        return output_of([str(self.bin / "llama-server"), "--list-devices"], 60.0)

    def read_model(self) -> dict[str, Any]:
        """The model's header, as gguf_info returns it, without the list of layers."""
        from ansible_collections.llamafleet.rpc.plugins.module_utils._gguf import read_model
        from ansible_collections.llamafleet.rpc.plugins.module_utils._model import model_from_header

        self.model = model_from_header(read_model(str(self.options.model))).to_dict()
        return {key: value for key, value in self.model.items() if key != "layers"}

    def workers_of(self, gpu: bool) -> list[dict[str, Any]]:
        """Instances as an operator writes them: the card, if it is lent, and the CPU. Both must hold layers."""
        layers = int(self.model["n_layer"])
        name = "CPU" if self.options.dry_run_cpu else "CUDA0"
        backend = "cpu" if self.options.dry_run_cpu else "cuda"
        first = {"name": "gpu", "port": free_port(), "devices": [name], "backend": backend, "max_units": layers - 3}
        # In a dry run there is no card that could take the other layers.
        most = layers if self.options.dry_run_cpu and not gpu else 8
        second = {"name": "cpu", "port": free_port(), "devices": ["CPU"], "backend": "cpu", "max_units": most}
        workers = [first, second] if gpu else [second]
        # Threads wait for each other by spinning: with two per process and two other programs busy on two cores, 32
        # tokens took over 60 s in place of one (measured on b11434). A dry run shares its machine with other tests.
        return [{**worker, "threads": 1} for worker in workers] if self.options.dry_run_cpu else workers

    def fleet(self, name: str, gpu_is_lent: bool) -> dict[str, Any]:
        """Workers, probe, record, plan, answer, and promised against measured."""
        from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_args import worker_instances

        build = {"bin_dir": str(self.bin), "worker_binary": TARGETS[0], "build": self.options.build}
        result: dict[str, Any] = {}
        self.report["steps"][name]["result"] = result  # what came out so far is kept if a later part fails
        place = self.work / name
        (place / "run").mkdir(parents=True)
        services = worker_instances(self.workers_of(gpu_is_lent), "box", self.facts, build, "default", HOST, str(place))
        self._with_workers(services, place, result, lambda: self._plan_and_ask(services, build, place, result))
        return result

    def _with_workers(
        self, services: list[dict[str, Any]], place: Path, result: dict[str, Any], inner: Callable[[], None]
    ) -> None:
        if not services:
            inner()
            return
        service, log = services[0]["service"], place / f"{services[0]['name']}.log"
        with running(service["argv"], service["environment"], log) as process:
            services[0]["pid"] = process.pid
            result.setdefault("idle", {})[services[0]["name"]] = self._probe(services[0]["endpoint"], process, log)
            self._with_workers(services[1:], place, result, inner)
            if process.poll() is not None:
                raise CheckError(f"worker {services[0]['name']} ended with {process.returncode}: {_tail(log)}")
            result.setdefault("after", {})[services[0]["name"]] = self._probe(services[0]["endpoint"], process, log)

    def _probe(self, endpoint: str, process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
        from ansible_collections.llamafleet.rpc.plugins.module_utils._rpc_wire import probe
        from ansible_collections.llamafleet.rpc.plugins.module_utils._runner import SystemRunner

        end = time.monotonic() + 60
        while True:
            answer = probe(SystemRunner(), HOST, int(endpoint.rsplit(":", 1)[1]), 5.0).to_dict()
            if answer["status"] == "ok":
                return answer
            if process.poll() is not None or time.monotonic() > end:
                raise CheckError(f"worker {endpoint}: {answer['status']}: {answer['hint']}: {_tail(log)}")
            time.sleep(0.2)

    def _plan_and_ask(
        self, services: Sequence[Mapping[str, Any]], build: Mapping[str, Any], place: Path, result: dict[str, Any]
    ) -> None:
        from ansible_collections.llamafleet.rpc.plugins.module_utils import _completion, _server_log
        from ansible_collections.llamafleet.rpc.plugins.module_utils._plan import plan_split
        from ansible_collections.llamafleet.rpc.plugins.module_utils._records import fleet_devices
        from ansible_collections.llamafleet.rpc.plugins.module_utils._server_args import server_args
        from ansible_collections.llamafleet.rpc.plugins.module_utils._worker_record import Inputs, build_record

        own_card = not self.options.dry_run_cpu and len(services) == 1
        own: list[dict[str, Any]] = [{"name": "own", "devices": ["CPU"], "max_units": 4 if len(services) == 1 else 0}]
        if own_card:
            own.append({"name": "card", "devices": ["CUDA0"], "max_units": int(self.model["n_layer"]) - 3})
        listed = self.report["steps"]["list_devices"]["result"] if not self.options.dry_run_cpu else None
        workers = Inputs(
            "box", "default", services, self.facts, build, probes=tuple(result["idle"].values()), listed=listed
        )
        primary = Inputs("head", "default", own, self.facts, build, primary=True, listed=listed)
        result["records"] = [build_record(primary), build_record(workers)]
        result["warnings"] = [*primary.warnings, *workers.warnings]
        plan = plan_split(self.model, fleet_devices(result["records"]), n_ctx=2048)
        result["plan"] = plan
        if not plan["feasible"]:
            raise CheckError(f"no plan: {plan['reason']}")
        port, log = free_port(), place / "server.log"
        argv = [str(self.bin / TARGETS[1]), *server_args(plan, self.model, build=self.options.build)]
        argv += ["-lv", "4", "--host", HOST, "--port", str(port), *(["-t", "1"] if self.options.dry_run_cpu else [])]
        environment = {"GGML_RPC_NO_RDMA": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "LLAMA_CACHE": str(place / "cache")}
        with running(argv, environment, log):
            api = _completion.parse_url(f"http://{HOST}:{port}")
            try:
                _completion.wait_until_ready(api, min(120.0, max(1.0, self.left())))
                answer = _completion.complete(api, _completion.PROMPT, 32, 60.0)
            except _completion.ProofError as error:
                raise CheckError(f"{error}: {_tail(log)}") from error
            result["held"] = output_of(
                ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
            ).splitlines()
        result["pids"] = {str(service["name"]): service["pid"] for service in services}
        result["answer"] = {
            "text": answer.text,
            "tokens_per_s": answer.tokens_per_s,
            "prompt_tokens_per_s": answer.prompt_tokens_per_s,
        }
        with log.open(encoding="utf-8", errors="replace") as lines:
            table, problems = _server_log.compare(plan, _server_log.parse(lines))
        result["promised_and_measured"], result["problems"] = table, problems
        _completion.judge(answer)
        wrong = [problem["text"] for problem in problems if problem["severity"] == "error"]
        if wrong:
            raise CheckError("; ".join(wrong))

    def run(self) -> None:
        """All steps, in order."""
        self.step("machine", self.machine)
        self.step("host_facts", self.host_facts)
        self.step("build", self.build)
        self.step("list_devices", self.list_devices)
        self.step("model", self.read_model)
        self.step("lent_card_and_cpu", lambda: self.fleet("lent_card_and_cpu", True))
        self.step("own_card_and_lent_cpu", lambda: self.fleet("own_card_and_lent_cpu", False))


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-1500:] if log.exists() else "no log"


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="llama.cpp source archive (tar), not needed for --dry-run-cpu")
    parser.add_argument("--model", required=True, help="GGUF file, a small one")
    parser.add_argument("--collection", default=str(Path(__file__).resolve().parents[2]), help="this collection")
    parser.add_argument("--output", required=True, help="JSON file to write")
    parser.add_argument("--build", default="b11434", help="build tag of the sources")
    parser.add_argument("--deadline", type=float, default=470.0, help="seconds that all of it may take")
    parser.add_argument("--dry-run-cpu", action="store_true", help="CPU workers, programs from LLAMAFLEET_TEST_BIN")
    options = parser.parse_args()
    if not options.dry_run_cpu and not options.source:
        parser.error("--source is needed: the llama.cpp source archive")
    with tempfile.TemporaryDirectory(prefix="llamafleet-gpu-") as directory:
        work = Path(directory)
        home = work / "collections" / "ansible_collections" / "llamafleet"
        home.mkdir(parents=True)
        (home / "rpc").symlink_to(Path(options.collection).resolve())
        sys.path.insert(0, str(work / "collections"))
        check = Check(options, work)
        try:
            check.run()
            check.report["ok"] = True
        except Exception as error:  # noqa: BLE001  whatever it is, the report must be written
            check.report["error"] = f"{type(error).__name__}: {error}"
            check.report["traceback"] = traceback.format_exc()
        check.report["seconds"] = round(time.monotonic() - check.started, 1)
        Path(options.output).write_text(json.dumps(check.report, indent=1, default=str) + "\n")
    sys.stderr.write(f"{'ok' if check.report['ok'] else check.report['error']}; see {options.output}\n")
    return 0 if check.report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
