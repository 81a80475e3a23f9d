"""What is installed is what was tested: the sdist builds the wheel, the wheel alone is the library
beside NumPy and xxhash, and with its extras it is the server.

Without a network: environments are fresh, and hold links to the packages of the tests' own. The
``long`` test installs from where pip finds them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stratakv.cli import LIBRARY_BENCHES, SERVE_MODULES
from stratakv.testing.patience import PATIENCE_S
from tests.doc_blocks import python_of
from tests.meta.source import ROOT
from tests.packages import build, done, run, sdist_in

SITE = Path(sysconfig.get_path("purelib"))
LIBRARY = (
    "core", "spec", "tree", "memory", "transfer", "storage", "policy", "agreement", "tiers",
    "connect", "sparse", "testing",
)  # fmt: skip
TESTING = (
    "pytest",
    "iniconfig",
    "packaging",
    "pluggy",
    "pygments",
    "hypothesis",
    "sortedcontainers",
)
EXAMPLE = """
import sys
import time

import numpy as np

from stratakv.core.clock import WallClock
from stratakv.core.ids import GroupId, LayerId, PageKey
from stratakv.memory.device_pools import DevicePools
from stratakv.memory.host_arena import HostArena
from stratakv.spec.groups import BufferSpec, CacheGroup, CacheSpec
from stratakv.spec.retention import KeepAll
from stratakv.storage.backend import ObjectKey, ReadStatus, StoreFormat, WriteStatus
from stratakv.storage.registry import open_storage
from stratakv.storage.urls import parse_storage_url
from stratakv.transfer.cpu import CpuTransferEngine
from stratakv.transfer.copy_plan import CopyPlan, Direction, GroupCopy
import stratakv.testing

buffer = BufferSpec(name="k", layers=(LayerId(0), LayerId(1)), rows_per_page=16, row_shape=(64,),
                    dtype="bfloat16")
group = CacheGroup(id=GroupId(0), name="full", retention=KeepAll(), buffers=(buffer,))
spec = CacheSpec(page_tokens=16, groups=(group,))
pools, arena = DevicePools(spec, [8]), HostArena(group, 8)
engine = CpuTransferEngine(spec, pools, [arena])
pools.raw(GroupId(0), "k")[:, 5] = 7
ids = [np.array([at], np.int32) for at in (5, 2, 3)]


def move(direction, device, host):
    engine.submit(CopyPlan(direction, (GroupCopy(GroupId(0), device, host),)))
    while not engine.ready(direction):
        time.sleep(0.001)
    (done,) = engine.take(direction, 1)
    assert done.ok


move(Direction.BACKUP, ids[0], ids[1])
form = StoreFormat(spec_digest=spec.digest, page_bytes=(group.page_bytes,))
keys = [ObjectKey(PageKey(bytes(32)), GroupId(0))]
store = open_storage(parse_storage_url(sys.argv[1]), form)
assert store.write(keys, arena.views(ids[1])) == [WriteStatus.STORED]
arena.poison(ids[1])
assert store.read(keys, arena.views(ids[2])) == [ReadStatus.HIT]
store.close()
move(Direction.LOAD, ids[1], ids[2])
engine.close()
assert (pools.raw(GroupId(0), "k")[:, 2] == 7).all()
heavy = {"torch", "transformers", "asyncio", "ssl", "pytest", "hypothesis"} & sys.modules.keys()
assert not heavy, heavy
print("moved")
"""

IMPORTS = """
import importlib, json, pkgutil, sys
import stratakv
found = {}
for package in sys.argv[1:]:
    name = f"stratakv.{package}"
    for module in pkgutil.walk_packages([f"{stratakv.__path__[0]}/{package}"], name + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            found[module.name] = error.name
print(json.dumps([found, sorted({"torch", "transformers"} & sys.modules.keys())]))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """By way of the sdist, so that nothing is missing from that."""
    sdist = sdist_in(tmp_path_factory.mktemp("dist"))
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked := tmp_path_factory.mktemp("unpacked"), filter="data")
    (source,) = unpacked.iterdir()
    return build("wheel", source, unpacked / "wheel")


class Environment:
    """A fresh one at ``path``, without pip and with nothing in it."""

    def __init__(self, path: Path) -> None:
        done(sys.executable, "-m", "venv", "--without-pip", path)
        self.bin = path / "bin"
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site = Path(done(self.bin / "python", "-c", where).strip())

    def link(self, *entries: Path) -> None:
        for entry in entries:
            (self.site / entry.name).symlink_to(entry)

    def install(self, requirement: str, *options: str) -> None:
        pip = (sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "-q")
        done(*pip, *options, requirement)


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Environment:
    """Python, NumPy, xxhash and the wheel, whose requirements pip finds met."""
    environment = Environment(tmp_path_factory.mktemp("bare") / "venv")
    for name in ("numpy", "xxhash"):
        tops = {Path(file).parts[0] for file in distribution(name).files or ()} - {".."}
        environment.link(*(SITE / top for top in tops if (SITE / top).exists()))
    environment.install(str(wheel), "--no-index")
    return environment


def test_a_wheel_brings_every_helper_types_and_no_tests(bare):
    installed = {p.relative_to(bare.site).as_posix() for p in bare.site.rglob("stratakv/**/*")}
    assert {"stratakv/py.typed", "stratakv/transfer/_gather.pyi"} <= installed
    sources = [path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*.c")]
    names = {path.with_suffix("").as_posix() for path in sources}
    built = {name for name in names if any(one.startswith(f"{name}.cpython") for one in installed)}
    # Made of the sdist, so of one that lacks a header, too, some would be missing.
    compiler = find_spec("stratakv.transfer._gather") is not None
    assert built == (names if compiler else set())
    assert not [name for name in os.listdir(bare.site) if name in {"tests", "demo", "scripts"}]


def test_the_library_runs_beside_numpy_and_xxhash_alone(bare, tmp_path):
    stored = tmp_path / "store"
    output = done(bare.bin / "python", "-c", EXAMPLE, f"file://{stored}?quota=64MiB", cwd=tmp_path)
    assert output == "moved\n"
    assert done(bare.bin / "stratakv", "fsck", stored).splitlines()[-1] == "clean"


def test_the_embedding_example_runs_beside_numpy_and_xxhash_alone(bare):
    """What the README shows, that the bytes are right, and then what docs/embedding.md adds."""
    (example,) = python_of("README.md")
    assert len(example.splitlines()) <= 60
    come_back = """
for group, pool in zip(groups, pools):
    for at in range(0 if group.keeps_all else 96 - 40, 100):
        page = tables[group.id][at // PAGE]
        assert (pool[page].reshape(PAGE, -1)[at % PAGE] == at).all(), (group.name, at)
"""
    identity = """
import json, tempfile
with tempfile.TemporaryDirectory() as directory:
    def write(byte):
        (Path(directory) / "config.json").write_text('{"model_type": "llama"}')
        head = json.dumps({"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}).encode()
        whole = len(head).to_bytes(8, "little") + head + bytes([byte] * 8)
        (Path(directory) / "model.safetensors").write_bytes(whole)
        return load_with_identity(directory, lambda at: "loaded")
    assert write(1) == write(1) and write(1)[0] == "loaded" and len(write(1)[1]) == 32
    assert write(1) != write(2)
"""
    blocks = [example, come_back, *python_of("docs/embedding.md"), "tiers.check()", identity]
    printed = done(bare.bin / "python", "-c", "\n".join(blocks)).splitlines()
    assert [int(line.split()[0]) for line in printed] == [0, 96, 400]
    assert [line.split(maxsplit=2)[2] for line in printed] == [
        "from the host", "from the host", "from the store",
    ]  # fmt: skip


def test_every_module_of_the_library_can_be_imported_alone(bare):
    lacking, loaded = json.loads(done(bare.bin / "python", "-c", IMPORTS, *LIBRARY))
    assert not loaded
    suites = {name: of for name, of in lacking.items() if name.startswith("stratakv.testing.")}
    assert set(suites.values()) <= {"pytest", "hypothesis", "torch"}
    others = {name: of for name, of in lacking.items() if name not in suites}
    assert others == {
        "stratakv.agreement.torch_ranks": "torch",
        "stratakv.connect.lmcache": "lmcache",
        "stratakv.connect.lmcache_tasks": "lmcache",
        "stratakv.connect.sglang": "sglang",
        "stratakv.connect.sglang_contract": "sglang",
        "stratakv.connect.sglang_hashes": "sglang",
        "stratakv.connect.sglang_pool": "torch",
        "stratakv.connect.vllm": "vllm",
        "stratakv.connect.vllm_contract": "vllm",
        "stratakv.connect.vllm_hashes": "vllm",
        "stratakv.sparse.triton_swap_in": "triton",
        "stratakv.transfer.triton_copy": "triton",
    }


MINE = """
import sys

import pytest
from stratakv.storage.memory import MemoryBackend
from stratakv.testing.storage_conformance import FORM, StorageConformance, StorageSubject


class TestMyStore(StorageConformance):
    @pytest.fixture
    def subject(self):
        small = lambda: MemoryBackend(FORM, quota_bytes=8 * FORM.page_bytes[0] + 1)
        return StorageSubject(
            open=MemoryBackend, corrupt=None, shared=False, lasting=False, small=small
        )


def test_nothing_else_was_loaded():
    assert not {"torch", "transformers"} & sys.modules.keys()
"""
NEED_TORCH = {
    "hit_engine": "the engine that HitEqualsRecompute loads when it is run",
    "kernel_conformance": "kernels compute on torch's tensors, and the suite names their dtypes",
    "kernel_oracle": "what they are compared with",
    "fleet": "runs the production engine, of which these take the step, its messages and results",
}
"""Of ``stratakv.testing``; whoever subclasses the others needs none."""


def test_suites_are_imported_and_run_without_torch(bare, tmp_path):
    """Beside what the extra ``testing`` brings."""
    environment = Environment(tmp_path / "venv")
    environment.link(*bare.site.glob("stratakv*"), *bare.site.glob("numpy*"))
    environment.link(*bare.site.glob("xxhash*"))
    for name in TESTING:
        tops = {Path(file).parts[0] for file in distribution(name).files or ()} - {".."}
        environment.link(*(SITE / top for top in tops if top != "__pycache__"))
    lacking, loaded = json.loads(done(environment.bin / "python", "-c", IMPORTS, "testing"))
    assert not loaded
    assert set(lacking.values()) == {"torch"}
    assert {name.split(".")[2] for name in lacking} == NEED_TORCH.keys()
    (tmp_path / "test_mine.py").write_text(MINE)
    pytest_of_it = (environment.bin / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider")
    printed = done(*pytest_of_it, "test_mine.py", cwd=tmp_path)
    assert " passed" in printed
    assert "failed" not in printed


@pytest.mark.parametrize("line", ["serve MODEL", "plan bytes MODEL", "bench serve", "bench ranks"])
def test_what_needs_the_extra_says_so(bare, line):
    ended = run(bare.bin / "stratakv", *line.split())
    assert ended.returncode == 2
    assert ended.stderr.startswith("stratakv: ")
    assert "torch, transformers, " in ended.stderr
    assert ended.stderr.endswith("allowed after: pip install 'stratakv[serve]'\n")


def test_benches_of_the_library_need_no_extra(bare):
    code = "from stratakv.bench import imports; imports.REPEATS = 1; imports.run()"
    assert "all of it" in done(bare.bin / "python", "-c", code)
    for name in LIBRARY_BENCHES:
        done(bare.bin / "python", "-c", f"import stratakv.bench.{name}")
    chats = ("--chats", "2", "--policies", "lru", "--specs", "full")
    assert "lru" in done(bare.bin / "stratakv", "bench", "policy", *chats)


def test_the_extras_are_what_is_tested(wheel, tmp_path):
    """Of this environment pip finds every requirement of ``all`` met, at its version."""
    environment = Environment(tmp_path / "venv")
    others = (e for e in SITE.iterdir() if "stratakv" not in e.name and e.suffix != ".pth")
    environment.link(*others)
    environment.install(f"{wheel}[all]", "--no-index")
    ended = run(environment.bin / "stratakv", "serve", tmp_path)
    assert ended.stderr == (
        f"stratakv: MODEL {tmp_path}: allowed is a directory with a Hugging Face config.json\n"
    )


def test_the_library_asks_for_numpy_and_xxhash_alone(bare):
    code = "from importlib.metadata import requires; print(*requires('stratakv'), sep=chr(10))"
    asked = done(bare.bin / "python", "-c", code).splitlines()
    needed = [line for line in asked if "extra ==" not in line]
    assert sorted(re.split("[<>]", line)[0] for line in needed) == ["numpy", "xxhash"]
    serve = {re.split("[<>]", line)[0] for line in asked if line.endswith('extra == "serve"')}
    assert {name.replace("-", "_") for name in serve} == set(SERVE_MODULES)


def serves(environment: Environment, directory: Path, *flags: str) -> None:
    """One completion."""
    words = ("serve", ROOT / "models" / "demo", "--port", "0", "--device-memory", "64MiB")
    with subprocess.Popen(
        [environment.bin / "stratakv", *words, "--host-memory", "64MiB", *flags],
        stdout=subprocess.PIPE, text=True, cwd=directory,
    ) as server:  # fmt: skip
        try:
            words = (word for line in server.stdout for word in line.split())
            address = next((word for word in words if word.startswith("http")), None)
            assert address is not None, "it ended before it listened"
            body = json.dumps({"prompt": "def", "max_tokens": 4}).encode()
            request = urllib.request.Request(
                f"{address}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                assert json.load(reply)["usage"]["completion_tokens"] == 4
        finally:
            server.send_signal(signal.SIGTERM)
            server.stdout.read()
        assert server.wait(PATIENCE_S) == 0


def required(name: str, extras: frozenset[str]) -> set[str]:
    """Distributions that pip brings with one, by name, itself among them."""
    found, todo = set(), [(name, extras)]
    while todo:
        name, extras = todo.pop()
        if (name, extras) in found:
            continue
        found.add((name, extras))
        for line in distribution(name).requires or ():
            asked = Requirement(line)
            chosen = [{"extra": extra} for extra in extras or ("",)]
            if asked.marker is None or any(map(asked.marker.evaluate, chosen)):
                todo.append((canonicalize_name(asked.name), frozenset(asked.extras)))
    return {name for name, _ in found}


def test_what_the_extra_brings_is_enough_to_serve_with_ranks(wheel, tmp_path):
    """What the tests themselves need may bring more, and hide what is missing."""
    environment = Environment(tmp_path / "venv")
    for name in required("stratakv", frozenset({"serve"})) - {"stratakv"}:
        tops = {Path(file).parts[0] for file in distribution(name).files or ()}
        there = (SITE / top for top in tops - {"..", "__pycache__"})
        environment.link(*(top for top in there if not (environment.site / top.name).exists()))
    environment.install(str(wheel), "--no-index", "--no-deps")
    serves(environment, tmp_path, "--tp", "2")


@pytest.mark.long
def test_a_fresh_install_serves(wheel, tmp_path):
    """By pip, from wherever it finds packages, with the versions that ``make`` installs."""
    environment = Environment(tmp_path / "venv")
    environment.install(f"{wheel}[serve]", "-c", str(ROOT / "constraints.txt"))
    serves(environment, tmp_path)
