import pkgutil
import subprocess
import sys

import sdcwatch.core

MODULES = sorted(m.name for m in pkgutil.iter_modules(sdcwatch.core.__path__, "sdcwatch.core."))


def test_the_core_configuration_and_errors_load_no_torch_and_read_no_environment():
    code = f"""
import importlib, os, sys, threading
class Untouchable(dict):
    def __getitem__(self, key): raise AssertionError(key)
    get = __contains__ = __getitem__
before = set(sys.modules)
import json, hashlib, pathlib, dataclasses, typing, enum, collections  # what they may use
os.environ = Untouchable()
for name in {MODULES!r} + ["sdcwatch", "sdcwatch.config", "sdcwatch.errors"]:
    importlib.import_module(name)
loaded = {{name.partition(".")[0] for name in set(sys.modules) - before}}
foreign = loaded - set(sys.stdlib_module_names) - {{"sdcwatch"}}
assert not foreign, foreign
assert threading.active_count() == 1
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_every_module_of_the_core_was_looked_at():
    assert {"sdcwatch.core.replay", "sdcwatch.core.records", "sdcwatch.core.summary"} < set(MODULES)
