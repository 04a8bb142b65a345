"""A member of a later version that cannot meet today's: `python pretended_release.py MODULE LINE NEW_LINE PROGRAM...`.

It replaces one line of a module of the package, such as the one with the protocol's version, and runs the program.
"""

import importlib.util
import runpy
import sys

name, line, other = sys.argv[1:4]
del sys.argv[:4]
spec = importlib.util.find_spec(name)
assert spec is not None
assert spec.origin is not None
with open(spec.origin) as file:  # noqa: PTH123  pathlib takes longer to import than the rest of this program.
    text = file.read()
assert text.count(line + "\n") == 1, f"{name} has no line {line!r}"
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
exec(compile(text.replace(line + "\n", other + "\n"), spec.origin, "exec"), module.__dict__)
if sys.argv[0] == "-m":
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    runpy.run_path(sys.argv[0], run_name="__main__")
