"""Executes the code cells of a notebook as a kernel does: in `__main__`, with sources that `inspect` finds.

python run_notebook.py NOTEBOOK SETTINGS: SETTINGS (JSON) is merged into `config` after the cell that defines it.
"""

import json
import linecache
import sys
from pathlib import Path


def main() -> None:
    cells = json.loads(Path(sys.argv[1]).read_text())["cells"]
    namespace = sys.modules["__main__"].__dict__
    for number, cell in enumerate(cells):
        if cell["cell_type"] != "code":
            continue
        source, name = "".join(cell["source"]), f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), namespace)
        if "config = {" in source:
            for section, values in json.loads(sys.argv[2]).items():
                namespace["config"].setdefault(section, {}).update(values)


if __name__ == "__main__":
    main()
