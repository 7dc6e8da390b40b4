"""impl/run.py of the checkout TREE in this process, to be killed: TREE ARGUMENTS...

Its guard, its proof of the service and its page are the real ones. Stand-ins are only the vocabularies that are in no
package, put there when the checkout's own code is found.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Any

STAND_INS = Path(__file__).resolve().parents[1] / "harmony_bytes.py"


def module(name: str, path: Path) -> Any:
    """The module in a file, under a name of its own: the guard refuses a `tests` of another checkout."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def main(tree: Path, arguments: list[str]) -> int:
    """The exit code of run.py."""
    path = tree / "impl" / "run.py"
    run = module("run", path)
    run.bootstrap(str(path))
    module("stand_ins", STAND_INS).stand_in()
    return run.main(arguments)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
