"""`python -m tests.full.compose.changes COMMIT`: exit code 0 if what differs from COMMIT can change an image.

That is a requirement file, a Dockerfile, the compose file, or an import of a process. Prints the first such file.
"""

from __future__ import annotations

import re
import subprocess
import sys

FILES = re.compile(
    r"requirements/|deploy/docker/|docker-compose\.yml$|\.dockerignore$|\.env\.example$|pyproject\.toml$"
)
PACKAGES = re.compile(r"(bapo|buffer_service|rollout_server|learner|services)/.*\.py$")
IMPORT = re.compile(r"[+-]\s*(import \w|from [\w.]+ import\b)|[+-].*\b(import_module|__import__)\(")


def reason(diff: str) -> str:
    """The first file in a diff of `git diff -U0` that an image depends on; '' if there is none."""
    path = ""
    for line in diff.splitlines():
        if line.startswith("diff --git "):
            path = line.rpartition(" b/")[2]
            if FILES.match(path):
                return path
        elif PACKAGES.match(path) and IMPORT.match(line):
            return path
    return ""


def main(commit: str) -> int:
    """0: the images change."""
    command = ["git", "diff", "--unified=0", "--no-ext-diff", commit]
    diff = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if found := reason(diff):
        sys.stdout.write(f"{found} changes what is in an image\n")
    return int(not found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
